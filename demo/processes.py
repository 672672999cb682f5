"""Processes that end when they should: started in a session of their own, ended with all their descendants.

The rule of this room: nothing is left over. Not after ``stop()``, not at the end of the interpreter, not when the
starting process itself is killed by ``kill -9``. A process is always ended by its own pid, never by a name.
"""

from __future__ import annotations

import atexit
import functools
import os
import pwd
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import psutil

T = TypeVar("T")


class ProcessFailed(RuntimeError):
    """A process ended, or did not become ready in time. The message carries the last lines of its log."""


class Service:
    """One long-running process, with everything that it starts.

    :param name: how it is called in messages.
    :param command: program and arguments.
    :param log: file that its output is appended to.
    :param env: the whole environment; default: that of this process.
    :param user: account to run as (only root may say so).
    :param stop_signal: what asks it to end.
    :param patience: seconds between ``stop_signal`` and SIGKILL.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str | Path],
        *,
        log: Path,
        env: Mapping[str, str] | None = None,
        user: pwd.struct_passwd | None = None,
        stop_signal: signal.Signals = signal.SIGTERM,
        patience: float = 10.0,
    ) -> None:
        self.name, self.command, self.log, self.env = name, [str(part) for part in command], log, env
        self.user, self.stop_signal, self.patience = user, stop_signal, patience
        self._process: subprocess.Popen[bytes] | None = None
        self._starter = 0

    @property
    def pid(self) -> int:
        """The process's own pid. Refused when it does not run."""
        if self._process is None:
            raise ProcessFailed(f"{self.name} is not running.")
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the process; it is not ready yet when this returns: see :meth:`wait_ready`."""
        if self.running:
            raise ProcessFailed(f"{self.name} already runs as pid {self.pid}.")
        self._starter = os.getpid()
        _live.add(self)  # first of all: an interrupt between here and the end of this function must not lose it
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self.env,
                cwd="/",
                start_new_session=True,
                **credentials(self.user),
            )
        tell_guardian(f"+{self.pid} {int(self.stop_signal)}")

    def wait_ready(self, probe: Callable[[], object], timeout: float = 20.0) -> None:
        """Return when ``probe`` no longer raises.

        :raises ProcessFailed: the process ended, or ``timeout`` seconds went by.
        """
        deadline, pause = time.monotonic() + timeout, 0.01
        while True:
            try:
                probe()
                return
            except Exception as error:
                if not self.running:
                    raise ProcessFailed(f"{self.name} ended while starting.\n{self.log_tail()}") from error
                if time.monotonic() > deadline:
                    raise ProcessFailed(f"{self.name} not ready after {timeout:g} s.\n{self.log_tail()}") from error
            time.sleep(pause)
            pause = min(pause * 1.5, 0.25)

    def stop(self) -> None:
        """Ask it to end, then end what is left of it. Nothing of it runs any more afterwards; repeatable.

        In a forked child of the starter this does nothing: the process is not the child's own.
        """
        if self._process is None or self._starter != os.getpid():
            _live.discard(self)
            return
        family = self.family()
        try:
            if self.running:
                self._process.send_signal(self.stop_signal)
                self._process.wait(self.patience)
        except subprocess.TimeoutExpired:
            pass  # its patience is spent: killed below
        finally:
            self._end([*family, *self.family()])

    def kill(self) -> None:
        """``kill -9`` of the process and all its descendants at one moment; all are gone when this returns."""
        if self._process is None:
            return
        if self.running:
            self._process.send_signal(signal.SIGSTOP)  # so that it starts no more children, nor sees them die
        self._end(self.family())

    def family(self) -> list[psutil.Process]:
        """The process, its descendants, and orphans of its session (a task whose supervisor was killed)."""
        if self._process is None:
            return []
        members: dict[int, psutil.Process] = {}
        if self.running:
            try:
                leader = psutil.Process(self._process.pid)
                members = {member.pid: member for member in (leader, *leader.children(recursive=True))}
            except psutil.NoSuchProcess:
                pass
        for pid in psutil.pids():
            try:
                if os.getsid(pid) == self._process.pid and pid not in members:
                    members[pid] = psutil.Process(pid)
            except (ProcessLookupError, psutil.NoSuchProcess):
                continue
        return list(members.values())

    def log_tail(self, lines: int = 15) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:]) if self.log.exists() else ""

    def _end(self, family: Iterable[psutil.Process]) -> None:
        end_all(family)
        if self._process is not None:
            self._process.wait(5)
            tell_guardian(f"-{self._process.pid}")
        self._process = None
        _live.discard(self)


def end_all(processes: Iterable[psutil.Process], timeout: float = 10.0) -> None:
    """``kill -9`` each of them and wait until none is left.

    :raises ProcessFailed: one is still there after ``timeout`` seconds (stuck in the kernel).
    """
    pending = list(processes)
    for process in pending:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    wait_for(lambda: not any(map(alive, pending)), timeout, "killed processes are gone")


def alive(process: psutil.Process) -> bool:
    """True while it can still do something: a zombie cannot."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def wait_for(condition: Callable[[], T | None], timeout: float, what: str, pause: float = 0.02) -> T:
    """Ask ``condition`` again and again until it is true, and return what it returned.

    :raises TimeoutError: naming ``what``, after ``timeout`` seconds.
    """
    deadline = time.monotonic() + timeout
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"Waited {timeout:g} s in vain until {what}.")
        time.sleep(pause)
    return found


def free_port(preferred: int = 0) -> int:
    """A TCP port on 127.0.0.1 that nobody listens on now: ``preferred`` if it is free, else any."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port whose last users are long gone is free
        try:
            probe.bind(("127.0.0.1", preferred))
        except OSError:
            probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def unprivileged_user() -> pwd.struct_passwd | None:
    """Whom to run servers as that refuse to run as root; None when this process is not root anyway."""
    return pwd.getpwnam("nobody") if os.geteuid() == 0 else None


def credentials(user: pwd.struct_passwd | None) -> dict[str, Any]:
    """The keywords with which :mod:`subprocess` runs a command as ``user``; none of them for None."""
    return {} if user is None else {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}


def temporary_directory(parent: str) -> Path:
    """A new directory below ``parent`` that is gone when this process is gone, however it ends."""
    directory = Path(tempfile.mkdtemp(prefix="runguard-", dir=parent))
    tell_guardian(f"~{directory}")
    return directory


_live: set[Service] = set()


@functools.cache
def _guardian() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-I", "-S", Path(__file__).with_name("guardian.py")],
        stdin=subprocess.PIPE,
        text=True,
        bufsize=1,
        start_new_session=True,
    )


def tell_guardian(line: str) -> None:
    pipe = _guardian().stdin
    assert pipe is not None
    pipe.write(line + "\n")


@atexit.register
def _stop_all() -> None:
    for service in list(_live):
        service.stop()
