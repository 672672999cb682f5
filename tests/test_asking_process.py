"""The process in which the caretaker asks by a DAG's functions: what hangs in it ends with all that it began."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from airflow_runguard import listener
from tests.core.books import wait_until


def test_what_hangs_while_it_asks_is_killed_with_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held, began = tmp_path / "held", tmp_path / "began"
    os.mkfifo(held)
    script = tmp_path / "python"  # stands for a DAG whose import starts a process of its own and hangs
    script.write_text(f"#!/bin/sh\nexec 3>{held}\nsleep 3600 &\n: >{began}\nwait\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    reading = os.open(held, os.O_RDONLY | os.O_NONBLOCK)
    try:
        for patience in (1.0, 4.0, 16.0, 64.0):
            monkeypatch.setattr(listener, "ASK_TIMEOUT", patience)
            with pytest.raises(subprocess.TimeoutExpired):
                listener.ask_by_dag("hangs", "tests")
            if began.exists():
                break
        assert began.exists()
        wait_until(lambda: _ended(reading), "nothing that it began holds the pipe any more")
    finally:
        os.close(reading)


def _ended(pipe: int) -> bool:
    try:
        return os.read(pipe, 1) == b""
    except BlockingIOError:  # somebody still has its other end
        return False
