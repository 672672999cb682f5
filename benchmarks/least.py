"""What lies under ``first_vs_bare``: the lines that a guarded task with one call must leave behind, and nothing else.

A record, its call and an event when it is claimed; the same three when it is done; and the lease. Two statements on
copies of the ledger's own tables, with their keys and indexes, but without a rule, trigger, look or decision; no
canonical payload, no thread, no canonical result. Whatever a guarded call costs, it costs more than this.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable

import psycopg

from airflow_runguard.core.sending import Sending

TABLES = """
    create schema least;
    create table least.record (like runguard.record including all);
    create table least.call (like runguard.call including all);
    create table least.event (like runguard.event including all);
    set search_path = least;
    set enable_seqscan = off;
"""  # the plans are made while the tables are empty

CLAIM = """
    with r as (
        insert into record (deployment, namespace, key, state, fence, claims, open_calls, nonce, ti_id, dag_id, task_id,
            run_id, try_number, map_index, host, pid, claimed_at, lease_until, hold_until, no_later_than,
            first_intent_at, calls, on_doubt, payload_version, payload_digest, payload_fields, payload_readable,
            store_result, digest)
        select 'bench', 'billing', %(key)s, 'running', 1, 1, 1, %(nonce)s, 'ti', 'bill', 'charge', 'run', 1, -1, 'host',
               1, t.at, t.at + interval '30 s', t.at + interval '1 h', t.at + interval '60 s', t.at, 'body', 'ask',
               1::smallint, %(nonce)s, '{"amount": "x"}', '{"amount": 500}', 'all', ''
          from (select clock_timestamp() as at) t returning id, claimed_at),
    c as (
        insert into call (record_id, generation, name, state, fence, intent_at, no_later_than, first_intent_at, claims)
        select r.id, 1, 'body', 'started', 1, r.claimed_at, r.claimed_at + interval '60 s', r.claimed_at, 1 from r),
    e as (
        insert into event (record_id, generation, fence, kind, actor)
        select r.id, 1, 1, 'claimed', 'bill.charge' from r)
    select id from r
"""
SETTLE = """
    with r as (
        update record set state = 'done', effect = 'applied', completeness = 'full', finished_at = t.at,
               lease_until = null, hold_until = null, open_calls = 0, no_later_than = null, claims = 0,
               result = %(result)s::bytea, result_digest = sha256(%(result)s::bytea), digest = sha256(%(result)s::bytea)
          from (select clock_timestamp() as at) t
         where id = %(id)s::bigint and fence = 1 and nonce = %(nonce)s
        returning id, finished_at, result, result_digest),
    c as (
        update call c set state = 'done', effect = 'applied', outcome_at = r.finished_at, result = r.result,
               result_digest = r.result_digest
          from r where c.record_id = %(id)s::bigint and c.generation = 1 and c.name = 'body'),
    e as (
        insert into event (record_id, generation, fence, kind, actor, mark)
        select r.id, 1, 1, 'done', 'bill.charge', %(nonce)s from r returning id)
    select r.finished_at, e.id from r, e
"""


def writer(ledger_url: str) -> Callable[[str], None]:
    """What writes the lines of one new key, on a connection of its own to an empty ledger's database."""
    connection = psycopg.connect(ledger_url, autocommit=True)
    connection.execute(TABLES)
    send = Sending(connection)

    def write(key: str) -> None:
        nonce = uuid.uuid4().hex
        (row,) = send(CLAIM, {"key": key, "nonce": nonce})
        if len(send(SETTLE, {"id": row["id"], "nonce": nonce, "result": b'{"id": 1}'})) != 1:
            raise RuntimeError("the lines that were to be measured were not written")

    return write
