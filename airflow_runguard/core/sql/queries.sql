-- The statements that Python sends. A block begins with `-- name:`; parameters are psycopg's %(name)s.

-- name: replay
-- The common answer to a rerun, by a plain look: done, readable, asked for with the payload that it was done with. No row
-- means nothing; the claim decides. Also given by a ledger that lost time: what it says was done was done.
select clock_timestamp() as now, r.id as record_id, r.generation, r.fence, r.store_result, r.result, r.result_missing
  from runguard.record r
 where r.deployment = %(deployment)s and r.namespace = %(namespace)s and r.key = %(key)s and r.state = 'done'
   and r.payload_version = %(payload_version)s::smallint and r.payload_digest = %(payload_digest)s
   and runguard.broken(r) = ''

-- name: claim
select * from runguard.claim(
    %(deployment)s, %(namespace)s, %(key)s,
    %(payload_version)s::smallint, %(payload_digest)s, %(payload_fields)s, %(payload_readable)s,
    %(calls)s, %(store_result)s, %(on_doubt)s,
    %(nonce)s, %(ti_id)s, %(dag_id)s, %(task_id)s, %(run_id)s, %(try_number)s::int, %(map_index)s::int,
    %(host)s, %(pid)s::int, %(actor)s, %(run_at)s::timestamptz,
    make_interval(secs => %(lease)s), make_interval(secs => %(max_hold)s), %(max_claims)s::int,
    make_interval(secs => %(max_call_time)s), make_interval(secs => %(key_lifetime)s::float8),
    %(gate)s, %(rate)s, %(max_pauses)s::int, make_interval(secs => %(max_pause)s),
    %(partition)s, %(amount)s::numeric, %(currency)s)

-- name: write
select * from runguard.write(
    %(record_id)s, %(generation)s::int, %(fence)s, %(actor)s, %(nonce)s, make_interval(secs => %(lease)s),
    %(body_done)s, %(o_name)s::text[], %(o_state)s::text[], %(o_class)s::text[], %(o_effect)s::text[], %(o_final)s::boolean[],
    %(o_resume_after)s::float8[], %(o_error)s::text[], %(o_evidence)s::text[], %(o_result)s::bytea[], %(o_missing)s::text[],
    %(i_name)s::text[], %(i_intent)s::text[], make_interval(secs => %(max_call_time)s), make_interval(secs => %(key_lifetime)s::float8),
    %(to)s, %(class)s, %(effect)s, %(needs_person)s::boolean, %(resume_after)s::float8,
    %(result)s::bytea, %(missing)s, %(completeness)s, %(error)s, %(evidence)s, make_interval(secs => %(hand_over)s::float8),
    %(rate)s, %(max_pauses)s::int, make_interval(secs => %(max_pause)s))

-- name: sweep
select * from runguard.sweep(%(actor)s, %(limit)s::int)

-- name: resolve
select runguard.resolve(%(record_id)s, %(seen_fence)s::bigint, %(answer)s, %(call)s, %(result)s::bytea, %(reference)s,
                        %(actor)s, %(reason)s, %(force)s) as verdict

-- name: remember
select runguard.remember(%(record_id)s, %(generation)s::int, %(fence)s, %(actor)s, %(call)s, %(external_id)s,
                         %(submitted)s) as verdict

-- name: adopt
select runguard.adopt(%(record_id)s, %(seen_fence)s::bigint, %(call)s, %(external_id)s, %(actor)s) as verdict

-- name: reopen
select runguard.reopen(%(record_id)s, %(seen_generation)s::int, %(again_although_applied)s, %(actor)s, %(reason)s) as verdict

-- name: release
select runguard.release(%(record_id)s, %(seen_fence)s::bigint, %(actor)s, %(reason)s) as verdict

-- name: repair
select runguard.repair(%(record_id)s, %(seen)s, %(state)s, %(actor)s, %(reason)s) as verdict

-- name: accept_payload
select runguard.accept_payload(%(record_id)s, %(actor)s, %(reason)s) as verdict

-- name: rename
select runguard.rename(%(record_id)s, %(namespace)s, %(key)s, %(actor)s, %(reason)s) as verdict

-- name: acknowledge_restore
select runguard.acknowledge_restore(%(lost_since)s::timestamptz, %(actor)s, %(reason)s) as epoch

-- name: confront
select runguard.confront(%(epoch)s::int, %(event_id)s::bigint, %(mark)s) as kept

-- name: lose
select runguard.lose(%(why)s)

-- name: bypass
select runguard.bypass(%(deployment)s, %(namespace)s, %(key)s, %(result)s::bytea, %(reference)s, %(actor)s, %(reason)s) as verdict

-- name: resume_now
select runguard.resume_now(%(record_id)s, %(seen_fence)s::bigint, %(actor)s, %(reason)s) as verdict

-- name: close_gate
select runguard.close_gate(%(deployment)s, %(gate)s, %(until)s::timestamptz, %(rate)s, null, %(actor)s, %(reason)s) as verdict

-- name: open_gate
select runguard.open_gate(%(deployment)s, %(gate)s, %(default_rate)s, %(actor)s, %(reason)s) as verdict

-- name: set_rate
select runguard.set_rate(%(deployment)s, %(gate)s, %(rate)s::float8, %(default_rate)s, %(actor)s, %(reason)s) as verdict

-- name: freeze
select runguard.set_freeze(%(deployment)s, %(scope)s, %(value)s, %(actor)s, %(reason)s) as verdict

-- name: thaw
select runguard.thaw(%(deployment)s, %(scope)s, %(value)s, %(actor)s, %(reason)s) as verdict

-- name: due
select * from runguard.due(%(ids)s::bigint[]) as id

-- name: watching
select runguard.watching(%(name)s, %(waits)s::int)

-- name: watched
select count(*) > 0 as watched, coalesce(sum(w.waits), 0)::int as waits
  from runguard.watcher w where w.at > clock_timestamp() - make_interval(secs => %(fresh)s)

-- name: ask
select runguard.ask(%(record_id)s, %(generation)s::int, %(ti_id)s, %(dag_id)s, %(task_id)s, %(run_id)s, %(map_index)s::int, %(actor)s)

-- name: give_up_asking
select runguard.give_up_asking(%(record_id)s, %(seen_fence)s::bigint, %(actor)s, %(reason)s) as verdict

-- name: questions
select q.*, r.state, r.fence, r.generation as generation_now, r.namespace, r.key, r.deployment
  from runguard.question q join runguard.record r on r.id = q.record_id
 where q.closed_at is null and r.deployment = %(deployment)s and (%(record_id)s::bigint is null or q.record_id = %(record_id)s)
 order by q.at limit 1000

-- name: close_question
update runguard.question q set closed_at = clock_timestamp() where q.ti_id = %(ti_id)s returning q.ti_id

-- name: tell
select runguard.tell(%(deployment)s, %(record_id)s, %(generation)s::bigint, %(kind)s, %(reason)s) as mine

-- name: take_notices
select n.*, r.namespace, r.key, r.dag_id, r.task_id, r.run_id, r.map_index, r.state, r.error, r.amount, r.currency
  from runguard.take_notices(%(deployment)s, %(actor)s, %(limit)s::int) n left join runguard.record r on r.id = n.record_id
 order by n.id

-- name: notice_sent
select runguard.notice_sent(%(id)s, %(error)s)

-- name: count_prevented
select runguard.count_prevented(%(deployment)s, %(namespace)s)

-- name: prevented
select coalesce(sum(p.times), 0)::bigint as times from runguard.prevented p
 where p.deployment = %(deployment)s and p.day >= current_date - %(days)s::int

-- name: gates
select g.*, clock_timestamp() as now,
       (select count(*) from runguard.record r
         where r.deployment = g.deployment and r.gate = g.name and r.state = 'paused') as waiting
  from runguard.gate g where g.deployment = %(deployment)s and (%(gate)s::text is null or g.name = %(gate)s) order by g.name

-- name: freezes
select f.* from runguard.freeze f where f.deployment = %(deployment)s and (f.thawed_at is null or %(all)s) order by f.id desc

-- name: meta
select m.*, runguard.lost_time(m) as lost_time,
       clock_timestamp() as now, current_setting('transaction_isolation') as isolation,
       current_setting('synchronous_commit') as synchronous_commit, current_setting('fsync') as fsync,
       current_setting('full_page_writes') as full_page_writes, current_setting('server_version') as server_version,
       current_setting('max_connections')::int as max_connections
  from runguard.meta m

-- name: schema_exists
select to_regclass('runguard.meta') is not null as there

-- name: find
select r.*, runguard.broken(r) as broken, encode(sha256(convert_to(r::text, 'UTF8')), 'hex') as seen
  from runguard.record r
 where r.deployment = %(deployment)s and r.namespace = %(namespace)s and r.key = %(key)s

-- name: find_key
select r.*, runguard.broken(r) as broken, encode(sha256(convert_to(r::text, 'UTF8')), 'hex') as seen
  from runguard.record r
 where r.deployment = %(deployment)s and (r.key = %(name)s or r.namespace || '/' || r.key = %(name)s)
 order by r.id limit 20

-- name: list
select r.*, runguard.broken(r) as broken, '' as seen
  from runguard.record r
 where r.deployment = %(deployment)s and r.id > %(after)s
   and (%(state)s::text is null or r.state = %(state)s)
   and (%(dag_id)s::text is null or r.dag_id = %(dag_id)s)
   and (%(namespace)s::text is null or r.namespace = %(namespace)s)
   and (%(prefix)s::text is null or starts_with(r.key, %(prefix)s))
   and (not %(needs_person)s or r.needs_person or r.state = 'in_doubt')
   and (not %(by_marker)s or exists (select from runguard.call c where c.record_id = r.id and c.generation = r.generation
                                        and c.state = 'in_doubt' and strpos(c.intent, '"runguard.sql"') > 0))
 order by r.id limit %(limit)s

-- name: calls
select c.* from runguard.call c where c.record_id = %(record_id)s order by c.generation, c.first_intent_at, c.name

-- name: events
select e.* from runguard.event e where e.record_id = %(record_id)s order by e.id

-- name: note_difference
select runguard.note_difference(%(record_id)s::bigint, %(generation)s::int, %(kind)s, %(actor)s, %(reason)s, %(detail)s) as new

-- name: lines
select c.*, r.namespace, r.key
  from runguard.call c join runguard.record r on r.id = c.record_id
 where r.deployment = %(deployment)s and c.intent_at >= %(begin)s and c.first_intent_at < %(end)s
   and (%(namespace)s::text is null or r.namespace = %(namespace)s)
   and (%(dag_id)s::text is null or r.dag_id = %(dag_id)s)
 order by c.record_id, c.generation, c.name
