"""What a task process pays in memory: its resident size after a guarded run, over one that only has plain Airflow.

Run as `python -m benchmarks.memory plain|guarded`; prints MiB. Both load what every task process has anyway: it is
forked, without an exec, from its supervisor (``airflow/sdk/execution_time/supervisor.py`` of Airflow 3.3.2, on Linux).
"""

from __future__ import annotations

import gc
import json
import os
import sys
import uuid


def resident() -> float:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmRSS"))


def plain() -> None:
    from airflow.providers.standard.decorators.python import python_task
    from airflow.providers.standard.operators.python import PythonOperator
    from airflow.sdk.execution_time import supervisor, task_runner

    assert PythonOperator
    assert python_task
    assert supervisor
    assert task_runner


def guarded() -> None:
    """A real guarded run through the Connections, as a task process does it."""
    import airflow_runguard.decorators
    from airflow_runguard import codec
    from airflow_runguard.config import connect_ledger, redis_client, settings
    from airflow_runguard.core import guard, keys, payloads
    from airflow_runguard.core.ledger import Ledger
    from airflow_runguard.core.record import Holder, Order

    options = settings()
    ledger = Ledger(connect_ledger(options), deployment=options.deployment)
    leases = guard.ready(ledger, redis_client(options))
    order = Order(
        identity=keys.identity(options.deployment, "memory", uuid.uuid4().hex),
        payload=payloads.payload({"amount": 500}),
    )
    work = guard.Work(order=order, holder=Holder(uuid.uuid4().hex), body=lambda _: 1, dump=codec.dump, load=codec.load)
    how = guard.run(ledger, leases, work)
    assert isinstance(how, guard.Done), how
    assert airflow_runguard.decorators


if __name__ == "__main__":
    plain()
    gc.collect()
    before = resident()
    if sys.argv[1] == "guarded":
        guarded()
        gc.collect()
    print(json.dumps({"before": before, "after": resident(), "pid": os.getpid()}))
