"""The process in which the caretaker asks by a DAG's functions: what hangs in it ends with all that it began."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from airflow_runguard import asking, listener
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


HANGS = """
import pathlib, subprocess, sys, time
held = open(sys.argv[1], "w")
subprocess.Popen(["sleep", "3600"], stdout=held)
pathlib.Path(sys.argv[2]).touch()
time.sleep(3600)
"""
STARTS = "import sys; from airflow_runguard import asking; asking.run([sys.executable, *sys.argv[1:]], 3600)"


def test_what_hangs_while_it_asks_ends_with_the_triggerer_that_is_killed(tmp_path: Path) -> None:
    held, began = tmp_path / "held", tmp_path / "began"
    os.mkfifo(held)
    reading = os.open(held, os.O_RDONLY | os.O_NONBLOCK)
    try:
        words = [sys.executable, "-c", STARTS, "-c", HANGS, str(held), str(began)]
        with subprocess.Popen(words) as triggerer:
            try:
                wait_until(began.exists, "it has begun")
                assert not _ended(reading)
            finally:
                triggerer.kill()
        wait_until(lambda: _ended(reading), "nothing that it began holds the pipe any more")
    finally:
        os.close(reading)


def test_what_it_began_and_left_behind_ends_with_it(tmp_path: Path) -> None:
    held = tmp_path / "held"
    os.mkfifo(held)
    reading = os.open(held, os.O_RDONLY | os.O_NONBLOCK)
    try:
        left = "import subprocess, sys; subprocess.Popen(['sleep', '3600'], stdout=open(sys.argv[1], 'w'), stderr=-3)"
        ended = asking.run([sys.executable, "-c", f"{left}; print('asked'); sys.exit(3)", str(held)], 600)
        assert (ended.returncode, ended.stdout) == (3, "asked\n")
        wait_until(lambda: _ended(reading), "nothing that it began holds the pipe any more")
    finally:
        os.close(reading)


def _ended(pipe: int) -> bool:
    try:
        return os.read(pipe, 1) == b""
    except BlockingIOError:  # somebody still has its other end
        return False
