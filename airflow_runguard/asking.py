"""A program that runs beside the triggerer and may hang: it ends with all that it began when its time is up, when
whoever started it is done with it, and when that one is killed.

As a program of its own (``python -m airflow_runguard.asking FD WORD …``) this file is the leash: a second process waits
for the end of the pipe that only the starter holds, whatever the program itself is doing. Imports nothing heavy.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress


def run(words: Sequence[str], timeout: float) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, in a session of its own.

    :param timeout: seconds after which it is killed.
    :raises subprocess.SubprocessError: it could not be run to its end.
    """
    reading, held = os.pipe()  # no program inherits `held`: it is closed when this process ends, however that ends
    try:
        leashed = [sys.executable, "-m", "airflow_runguard.asking", str(reading), *words]
        with subprocess.Popen(  # noqa: S603  # no shell; the words are ours
            leashed,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            pass_fds=[reading],
        ) as asking:
            try:
                out, err = asking.communicate(timeout=timeout)
            except BaseException:
                os.killpg(asking.pid, signal.SIGKILL)  # it is not waited for yet, so it is that one
                raise
        return subprocess.CompletedProcess(list(words), asking.returncode, out, err)
    finally:
        os.close(reading)
        os.close(held)


def _leash(reading: int, words: Sequence[str]) -> None:
    """Become the program; a child of it ends them all at the end of the pipe."""
    if os.fork():
        os.close(reading)
        os.execv(words[0], list(words))  # noqa: S606  # likewise
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (1, 2):
        os.dup2(nothing, stream)  # else who reads them waits for this process
    with suppress(OSError):
        os.read(reading, 1)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    _leash(int(sys.argv[1]), sys.argv[2:])
