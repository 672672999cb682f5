"""Ends processes whose starter has died; run as a script, one beside each process that starts servers.

Reads lines ``+PID SIGNAL`` (watch it), ``-PID`` (it was ended in order) and ``~DIRECTORY`` (temporary) from its
standard input. When the input ends, the starter is dead, also by ``kill -9``: each watched process gets its signal,
ten seconds later what is left of its session is killed, and the directories are removed. Unlike ``PR_SET_PDEATHSIG``
this does not fire when merely the starting *thread* ends, needs no code between fork and exec, and reaches
grandchildren. Standard library only: it must start in milliseconds.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time


def session(leader: int) -> set[int]:
    """Pids of all processes whose session ``leader`` founded; only itself where there is no /proc."""
    members = {leader}
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        with contextlib.suppress(OSError, ValueError):
            if os.getsid(int(name)) == leader:
                members.add(int(name))
    return members


def running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] != "Z"
    return True


def main() -> None:
    watched: dict[int, int] = {}
    temporary: list[str] = []
    for line in sys.stdin:
        match line[0], line[1:].rstrip("\n"):
            case "+", pid_and_signal:
                pid, number = map(int, pid_and_signal.split())
                watched[pid] = number
            case "-", pid_alone:
                watched.pop(int(pid_alone), None)
            case "~", directory:
                temporary.append(directory)
    families = {leader: session(leader) for leader in watched}
    for leader, number in watched.items():
        with contextlib.suppress(ProcessLookupError):
            os.kill(leader, number)
    deadline = time.monotonic() + 10
    while any(map(running, watched)) and time.monotonic() < deadline:
        time.sleep(0.1)
    for leader, family in families.items():
        for pid in family | session(leader):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    for directory in temporary:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
