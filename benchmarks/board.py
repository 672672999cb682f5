"""How long the pages' answers take, at the API, with a full ledger: `make bench-ledger`, ``benchmarks/board.json``.

95th percentiles in milliseconds over a mix of what people ask: the overview; lists with each filter, from each end and
from the middle; one record of a million items. ``--rows`` says how full; 10,000,000 takes a quarter of an hour.
"""

from __future__ import annotations

import psycopg

DEPLOYMENT = "bench"
STEP = 50_000

FILL = """
    insert into runguard.record (deployment, namespace, key, state, fence, failure_class, effect, completeness,
        needs_person, first_unknown_at, resume_at, finished_at, lease_until, nonce, calls, on_doubt, payload_version,
        payload_digest, payload_fields, payload_readable, store_result, result, result_digest, digest, dag_id, task_id,
        run_id, try_number, map_index, host, ti_id, gate, partition, amount, currency, error, created_at, claimed_at)
    select %(deployment)s, 'dag_' || d || '.charge', 'invoice/' || lpad(n::text, 9, '0'), s.state, 1,
        case s.state when 'failed' then (array['validation', 'processing', 'quota'])[1 + n %% 3]
                     when 'in_doubt' then (array['timeout', 'unknown'])[1 + n %% 2] when 'paused' then 'quota' end,
        case s.state when 'done' then 'applied' when 'in_doubt' then 'unknown' when 'failed' then 'not_applied'
                     when 'paused' then 'not_applied' end,
        case s.state when 'done' then 'full' else 'none' end, s.state = 'failed' and n %% 10 = 0 or s.state = 'in_doubt',
        case s.state when 'in_doubt' then b.at end, case s.state when 'paused' then clock_timestamp() + interval '1 h' end,
        case s.state when 'done' then b.at end, case s.state when 'running' then clock_timestamp() + interval '1 h' end,
        md5(n::text), 'body', 'ask', 1, md5(n::text) || md5(n::text), '{"amount": "x"}', '{"amount": 500}', 'all',
        case s.state when 'done' then '{"v":1,"value":1}'::bytea end,
        case s.state when 'done' then sha256('{"v":1,"value":1}'::bytea) end, '', 'dag_' || d, 'charge',
        'scheduled__' || n / 1000, 1, -1, 'worker-' || n %% 50, md5('ti' || n),
        case when n %% 4 = 0 then 'stripe' end, to_char(b.at, 'YYYY-MM-DD'), 4900, 'EUR',
        case s.state when 'failed' then 'HTTP 402 from api.example' when 'in_doubt' then 'read timeout' else '' end, b.at, b.at
      from generate_series(%(low)s::int, %(high)s::int) n
     cross join lateral (select case when n %% 20 = 0 then 1 + n / 20 %% 40 else n %% 8 + 1 end as d) d
     cross join lateral (select clock_timestamp() - make_interval(secs => (%(rows)s - n) * 2.5e6 / %(rows)s) as at) b
     cross join lateral (select case when n %% 1000 < 12 then 'paused' when n %% 1000 < 22 then 'failed'
                when n %% 1000 < 25 then 'in_doubt' when n %% 1000 < 30 then 'pending'
                when n >= %(rows)s - 40 then 'running' else 'done' end as state) s
"""
EVENTS = """
    insert into runguard.event (at, record_id, generation, fence, kind, actor)
    select r.created_at, r.id, 1, 1, k.kind, 'bench' from runguard.record r cross join (values ('claimed'), ('answered'), ('done')) k (kind)
     where r.id between %(low)s and %(high)s
"""
ITEMS = """
    insert into runguard.call (record_id, generation, name, state, fence, intent, intent_at, no_later_than, first_intent_at,
        first_unknown_at, outcome_at, effect)
    select %(id)s, 1, 'item-' || lpad(n::text, 9, '0'), case when n %% 100000 = 7 then 'in_doubt' else 'done' end, 1, '{"n": 1}',
        clock_timestamp(), clock_timestamp(), clock_timestamp(), case when n %% 100000 = 7 then clock_timestamp() end,
        clock_timestamp(), 'applied' from generate_series(%(low)s::int, %(high)s::int) n
"""


def fill(url: str, rows: int) -> int:
    """``rows`` records as a year of work leaves them, the first of them with as many items; its id."""
    with psycopg.connect(url, autocommit=True) as connection:
        for low in range(0, rows, STEP):
            with connection.transaction():
                connection.execute("select set_config('runguard.writing', 'on', true)")
                window = {"low": low, "high": min(low + STEP, rows) - 1}
                connection.execute(FILL, {**window, "rows": rows, "deployment": DEPLOYMENT})
            connection.execute("select runguard.fold()")
        row = connection.execute("select min(id), max(id) from runguard.record where state = 'in_doubt'").fetchone()
        assert row is not None
        bulky = int(row[0])
        for low in range(0, rows, STEP):
            window = {"low": low, "high": min(low + STEP, rows) - 1}
            connection.execute(ITEMS, {**window, "id": bulky})
            connection.execute(EVENTS, {"low": low + 1, "high": min(low + STEP, rows)})
        connection.execute(
            "insert into runguard.gate (deployment, name, closed_until, why) "
            "values (%s, 'stripe', clock_timestamp() + interval '1 h', '429')",
            [DEPLOYMENT],
        )
        connection.execute("vacuum analyze")
    return bulky
