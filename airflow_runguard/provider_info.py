"""What Airflow learns from the installed package: pure data, read on every start of its command line.

Imports nothing, so that having the package installed costs nothing. Defaults are texts because Airflow's configuration
wants them so; ``config.py`` is their only reader. What the options mean is said here once, and shown by
``airflow config list --section runguard --include-descriptions``.
"""

from typing import Any


def get_provider_info() -> dict[str, Any]:
    """The entry point ``apache_airflow_provider``."""
    return {
        "package-name": "airflow-runguard",
        "name": "RunGuard",
        "description": "Tasks that charge, pay out, send or order have their effect once, whatever Airflow does.\n",
        "versions": ["0.1.0"],
        # Airflow reads ``class-name``; its schema also knows ``path``, which nothing reads.
        "task-decorators": [
            {"name": "guarded", "class-name": "airflow_runguard.decorators.guarded_task"},
            {"name": "guarded_batch", "class-name": "airflow_runguard.batches.guarded_batch_task"},
        ],
        "cli": ["airflow_runguard.cli.get_commands"],
        "config": {
            "runguard": {
                "description": "Guarded tasks: where their ledger is, and how long things may take.\n",
                "options": _OPTIONS,
            }
        },
    }


def _option(kind: str, default: str, example: str, description: str) -> dict[str, str]:
    return {
        "description": f"{description}\n",
        "version_added": "0.1.0",
        "type": kind,
        "example": example,
        "default": default,
    }


_OPTIONS = {
    "deployment": _option(
        "string",
        "default",
        "production",
        "The name of this Airflow in its ledger, bound to the ledger by ``airflow runguard db upgrade``. A ledger that "
        "is bound to another name is refused.",
    ),
    "ledger_conn_id": _option(
        "string", "runguard_ledger", "billing_ledger", "The Connection (type postgres) of the ledger."
    ),
    "redis_conn_id": _option(
        "string",
        "runguard_redis",
        "billing_redis",
        "The Connection (type redis) of the lease. It may be missing: the ledger alone keeps every promise, slower.",
    ),
    "depth": _option(
        "string",
        "auto",
        "lease",
        "How deep tasks are guarded: ``observe`` (book, warn, block nothing), ``ledger``, ``lease`` (ledger and "
        "Redis), or ``auto``, which is ``lease`` where the Redis Connection exists and ``ledger`` where it does not.",
    ),
    "lease_ttl": _option(
        "integer", "30", "60", "Seconds after which a holder that was not heard of counts as dead. Renewed at a third."
    ),
    "max_hold": _option(
        "integer", "21600", "3600", "Seconds for which one holder may renew its lease; ends the hold of a hung body."
    ),
    "max_call_time": _option(
        "integer",
        "600",
        "120",
        "Seconds from a call's intent within which its request can still reach the vendor. Until then nobody's "
        "*it did not happen* counts.",
    ),
    "max_claims": _option(
        "integer",
        "5",
        "3",
        "Claims of a record without any booked outcome after which it is poison and waits for a person.",
    ),
    "key_lifetime": _option(
        "integer",
        "86400",
        "2592000",
        "Seconds for which the vendor remembers an idempotency key. ``on_doubt='replay'`` repeats a call until "
        "``max_call_time`` before that.",
    ),
    "busy_wait_limit": _option(
        "integer",
        "86400",
        "3600",
        "Seconds for which one try of a task waits (for another holder of its key, a ledger that is away) before it "
        "fails and says why. It ends no waiting for a quota (``max_pause``), a freeze, ``enabled = false``, a person "
        "(``ask_timeout``), or a previous run that is there.",
    ),
    "enabled": _option(
        "boolean",
        "true",
        "false",
        "``false`` makes every guarded task wait: nothing is called, and nothing runs unguarded.",
    ),
    "resume_rate": _option(
        "float",
        "5",
        "0.5",
        "Tasks that go on each second when a gate has opened, where the gate has no rate of its own.",
    ),
    "max_pauses": _option(
        "integer", "1000", "20", "Pauses without any progress after which a record waits for a person."
    ),
    "max_pause": _option(
        "integer",
        "604800",
        "86400",
        "Seconds for which a record waits for its quota without any progress before it waits for a person.",
    ),
    "show_results": _option(
        "boolean",
        "false",
        "true",
        "``true`` shows stored results, orders and the arguments of calls on the ledger's pages and in its API.",
    ),
    "mask_fields": _option(
        "string",
        "",
        "email,iban",
        "Names of fields, separated by commas, that are masked before the order and the arguments of calls are stored "
        "for people to read, and in results that are shown. Fields that look secret always are.",
    ),
    "ask_timeout": _option(
        "integer",
        "604800",
        "86400",
        "Seconds for which a task in doubt waits for a person's answer before it fails. The doubt stays in the ledger.",
    ),
    "max_triggers": _option(
        "integer",
        "500",
        "200",
        "Guarded tasks that wait in triggerers at most; the others wait by rescheduling. A triggerer has 1,000 places, "
        "which it shares with everybody.",
    ),
    "observe_dags": _option(
        "string",
        "",
        "billing_*,payout",
        "DAGs whose unguarded tasks are booked as they run, by a listener that holds nothing up: names with ``*``, "
        "separated by commas. Empty: none.",
    ),
    "observe_timeout": _option(
        "float", "0.5", "0.2", "Seconds that an observed task waits for the ledger at most, in all."
    ),
    "notifiers": _option(
        "string",
        "",
        "my_company.alerts.ON_CALL",
        "Dotted path of a ``RunGuardNotifier`` (or a list of them) that tells people what needs them.",
    ),
    "test_deployment": _option(
        "string",
        "",
        "production",
        "The deployment that ``dag.test()`` and ``airflow tasks test`` write under, so that a test marks no production "
        "work done. Empty: ``<deployment>~test``. The deployment's own name: tests count as real work.",
    ),
}
