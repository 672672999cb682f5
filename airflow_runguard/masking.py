"""What is hidden from people: ``[runguard] mask_fields`` and what Airflow's own secrets masker knows.

Applied before anything readable is stored, and once more where a stored result is shown; results are stored as they
are, since a replay has to give them back. Never applied to what is compared or sent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Hide = Callable[[Any], Any]


def hider(fields: str, redact: Hide) -> Hide:
    """A function that hides in plain data (dicts, lists, texts) whatever stands under one of ``fields``, at any depth.

    :param fields: names, separated by commas; upper and lower case are the same.
    :param redact: Airflow's masker as this process has it.
    """
    names = {name.strip().lower() for name in fields.split(",") if name.strip()}

    def hide(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: "***" if str(key).lower() in names else hide(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [hide(item) for item in value]
        return value

    return lambda value: redact(hide(value))
