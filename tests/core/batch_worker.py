"""A process that runs batches over the vendor, each in a child of its own that may be killed at any moment.

It has loaded all that a worker needs, so that a worker costs a fork. Each line that it reads is ``null`` (end the last
child's turn) or a plan: ``ledger``, ``vendor`` (URLs), ``key``, ``items`` (how many), ``concurrency``, ``bulk``,
``on_doubt``, ``redis`` (a URL; ``null`` = none). It answers a plan with the child's pid, and ``null`` with how that
child's batch ended: nothing where it was killed. Until then the child is not reaped, so that its pid means nobody else.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from airflow_runguard.core import guard
from tests.core import batches, engine
from tests.core.accidents import charge


def work(plan: dict[str, Any]) -> guard.How:
    ledger = engine.open_ledger(plan["ledger"])

    def pay(context: Any, item: Any) -> Any:
        if plan["bulk"]:
            return {key: charge(plan["vendor"], key, context.idempotency_keys[key]) for key in item}
        return charge(plan["vendor"], item["id"], context.idempotency_key)

    return batches.run(
        ledger,
        lambda: ({"id": f"{plan['key']}-{number}", "cents": 500} for number in range(plan["items"])),
        pay,
        what=batches.order(plan["key"], on_doubt=plan["on_doubt"], max_claims=1000),
        concurrency=plan["concurrency"],
        bulk=plan["bulk"],
        redis_url=plan["redis"],
    )


def begin(plan: dict[str, Any]) -> tuple[int, int]:
    """The pid of a new worker, and the pipe by which it says how it ended."""
    ear, mouth = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(ear)
            os.write(mouth, type(work(plan)).__name__.encode())
        finally:
            os._exit(0)
    os.close(mouth)
    return pid, ear


def main() -> None:
    pid, ear = 0, -1
    for line in sys.stdin:
        plan = json.loads(line)
        if plan is not None:
            pid, ear = begin(plan)
            answer = str(pid)
        else:
            with os.fdopen(ear) as said:
                answer = said.read()
            os.waitpid(pid, 0)
        sys.stdout.write(f"{answer}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
