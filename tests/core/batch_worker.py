"""A process that runs one batch over the vendor, to be killed at any moment.

Reads a plan from standard input: ``ledger``, ``vendor`` (URLs), ``key``, ``items`` (how many), ``concurrency``,
``bulk``, ``on_doubt``. Writes how it ended.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from tests.core import batches, engine
from tests.core.accidents import charge


def main() -> None:
    plan = json.load(sys.stdin)
    ledger = engine.open_ledger(plan["ledger"])

    def pay(context: Any, item: Any) -> Any:
        if plan["bulk"]:
            return {key: charge(plan["vendor"], key, context.idempotency_keys[key]) for key in item}
        return charge(plan["vendor"], item["id"], context.idempotency_key)

    how = batches.run(
        ledger,
        lambda: ({"id": f"{plan['key']}-{number}", "cents": 500} for number in range(plan["items"])),
        pay,
        what=batches.order(plan["key"], on_doubt=plan["on_doubt"], max_claims=1000),
        concurrency=plan["concurrency"],
        bulk=plan["bulk"],
    )
    sys.stdout.write(type(how).__name__)


if __name__ == "__main__":
    main()
