-- The statements that Python sends. A block begins with `-- name:`; parameters are psycopg's %(name)s.

-- name: replay
-- The common answer to a rerun, by a plain look: done, readable, asked for with the payload that it was done with. No row
-- means nothing; the claim decides (so it does for a former name, which gives what its record has now). Also given by a
-- ledger that lost time: what it says was done was done.
select clock_timestamp() as now, r.id as record_id, r.generation, r.fence, r.store_result, r.result, r.result_missing
  from runguard.record r
 where r.deployment = %(deployment)s and r.namespace = %(namespace)s and r.key = %(key)s and r.state = 'done'
   and r.payload_version = %(payload_version)s::smallint and r.payload_digest = %(payload_digest)s
   and r.renamed_to is null and runguard.broken(r) = ''

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

-- name: settle_body
select * from runguard.settle_body(%(record_id)s, %(generation)s::int, %(fence)s, %(nonce)s, %(actor)s,
    %(completeness)s, %(error)s, %(result)s::bytea, %(missing)s)

-- name: write
select * from runguard.write(
    %(record_id)s, %(generation)s::int, %(fence)s, %(actor)s, %(nonce)s, make_interval(secs => %(lease)s),
    %(o_name)s::text[], %(o_state)s::text[], %(o_class)s::text[], %(o_effect)s::text[], %(o_final)s::boolean[],
    %(o_resume_after)s::float8[], %(o_error)s::text[], %(o_evidence)s::text[], %(o_result)s::bytea[], %(o_missing)s::text[],
    %(i_name)s::text[], %(i_intent)s::text[], make_interval(secs => %(max_call_time)s), make_interval(secs => %(key_lifetime)s::float8),
    %(to)s, %(class)s, %(effect)s, %(needs_person)s::boolean, %(resume_after)s::float8,
    %(result)s::bytea, %(missing)s, %(completeness)s, %(error)s, %(evidence)s, make_interval(secs => %(hand_over)s::float8),
    %(rate)s, %(max_pauses)s::int, make_interval(secs => %(max_pause)s))

-- name: sweep
select * from runguard.sweep(%(actor)s, %(limit)s::int)

-- DAGs with a record in doubt that asks the vendor, when nobody has moved it for a while and none of its requests can
-- arrive any more: its task comes back for it no more, or takes its time.
-- name: dags_to_ask
select distinct r.dag_id from runguard.record r
 where r.deployment = %(deployment)s and r.state = 'in_doubt' and r.on_doubt = 'reconcile' and r.dag_id <> ''
   and r.updated_at < clock_timestamp() - make_interval(secs => %(idle)s)
   and coalesce(r.no_later_than < clock_timestamp(), true)
 order by r.dag_id

-- name: resolve
select runguard.resolve(%(record_id)s, %(seen_fence)s::bigint, %(answer)s, %(call)s, %(result)s::bytea, %(reference)s,
                        %(actor)s, %(reason)s, %(force)s, %(known_by)s::timestamptz) as verdict

-- name: remember
select runguard.remember(%(record_id)s, %(generation)s::int, %(fence)s, %(actor)s, %(call)s, %(external_id)s,
                         %(submitted)s) as verdict

-- name: adopt
select runguard.adopt(%(record_id)s, %(seen_fence)s::bigint, %(call)s, %(external_id)s, %(actor)s) as verdict

-- name: renamed
select e.* from runguard.event e where e.record_id = %(record_id)s and e.kind = 'renamed' order by e.id

-- name: reopen
select runguard.reopen(%(record_id)s, %(seen_generation)s::int, %(seen_fence)s::bigint, %(again_although_applied)s, %(actor)s, %(reason)s) as verdict

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

-- The time of a question. Whoever is changing the record is waited for (a share lock waits for every change, a key share
-- lock would not): so what is not seen after this came to be known later. The clock is read when the lock is held.
-- name: time_of_question
with held as materialized (
    select r.id from runguard.record r
     where r.deployment = %(deployment)s and r.namespace = %(namespace)s and r.key = %(key)s for share)
select clock_timestamp() as at from (select count(*) from held) waited

-- name: ask
select runguard.ask(%(record_id)s, %(generation)s::int, %(fence)s::bigint, %(ti_id)s, %(dag_id)s, %(task_id)s, %(run_id)s, %(map_index)s::int, %(at)s, %(actor)s)

-- name: give_up_asking
select runguard.give_up_asking(%(record_id)s, %(seen_fence)s::bigint, %(actor)s, %(reason)s) as verdict

-- name: questions
select q.*, r.state, r.generation as generation_now, r.namespace, r.key, r.deployment,
       -- In the doubt that it was asked about, and not that of a later holder.
       r.state = 'in_doubt' and q.generation = r.generation and q.fence = r.fence
       and q.at >= coalesce((select m.unknown_before from runguard.meta m), '-infinity')    -- nor one from before lost time
       and not (
           -- Since it was asked, all that is in doubt turned out to be jobs: its task attaches to them.
           exists (select from runguard.event e where e.record_id = r.id and e.kind = 'remembered' and e.at > q.at)
           and (select coalesce(bool_and(c.submitted), false) from runguard.call c where c.record_id = r.id
                   and c.generation = r.generation and c.state in ('started', 'in_doubt'))) as stands
  from runguard.question q join runguard.record r on r.id = q.record_id
 where q.closed_at is null and r.deployment = %(deployment)s and (%(record_id)s::bigint is null or q.record_id = %(record_id)s)
 order by q.at limit 1000

-- name: close_question
update runguard.question q set closed_at = clock_timestamp() where q.ti_id = %(ti_id)s returning q.ti_id

-- name: tell
select runguard.tell(%(deployment)s, %(record_id)s, %(generation)s::bigint, %(kind)s, %(reason)s, %(occasion)s) as mine

-- name: take_notices
select n.*, r.namespace, r.key, r.dag_id, r.task_id, r.run_id, r.map_index, r.state, r.error, r.amount, r.currency
  from runguard.take_notices(%(deployment)s, %(actor)s, %(limit)s::int) n left join runguard.record r on r.id = n.record_id
 order by n.id

-- name: notice_sent
select runguard.notice_sent(%(id)s, %(error)s)

-- name: count_replay
select runguard.count_replay(%(deployment)s, %(namespace)s, %(key)s)

-- name: gates
select g.*, clock_timestamp() as now,
       (select count(*) from runguard.record r
         where r.deployment = g.deployment and r.gate = g.name and r.resume_at is not null) as waiting
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
select r.*, runguard.broken(r) as broken, encode(sha256(convert_to(r::text, 'UTF8')), 'hex') as seen,
       runguard.present_name(r) as present_name
  from runguard.record r
 where r.deployment = %(deployment)s and r.namespace = %(namespace)s and r.key = %(key)s

-- name: find_key
select r.*, runguard.broken(r) as broken, encode(sha256(convert_to(r::text, 'UTF8')), 'hex') as seen,
       runguard.present_name(r) as present_name
  from runguard.record r
 where r.deployment = %(deployment)s and (r.key = %(name)s or r.namespace || '/' || r.key = %(name)s)
 order by r.id limit 20

-- Former names of records only where a name is looked for.
-- name: list
select r.*, runguard.broken(r) as broken, '' as seen, runguard.present_name(r) as present_name
  from runguard.record r
 where r.deployment = %(deployment)s and r.id > %(after)s
   and (%(state)s::text is null or r.state = %(state)s)
   and (%(dag_id)s::text is null or r.dag_id = %(dag_id)s)
   and (%(namespace)s::text is null or r.namespace = %(namespace)s)
   and (%(prefix)s::text is null and r.renamed_to is null or starts_with(r.key, %(prefix)s))
   and (not %(needs_person)s or r.needs_person or r.state = 'in_doubt')
   and (not %(by_marker)s or exists (select from runguard.call c where c.record_id = r.id and c.generation = r.generation
                                        and c.state = 'in_doubt' and strpos(c.intent, '"runguard.sql"') > 0))
 order by r.id limit %(limit)s

-- name: waiting
select r.*, runguard.broken(r) as broken, '' as seen, runguard.present_name(r) as present_name
  from runguard.record r
 where r.deployment = %(deployment)s and r.gate = %(gate)s and r.resume_at is not null
 order by r.resume_at, r.id limit %(limit)s

-- name: calls
select x.* from (select c.*, runguard.attachable(c) as attachable from runguard.call c where c.record_id = %(record_id)s
    order by c.state in ('started', 'in_doubt') desc, c.generation, c.first_intent_at, c.name limit 1000) x   -- a batch has more
 order by x.generation, x.first_intent_at, x.name

-- name: events
select e.* from runguard.event e where e.record_id = %(record_id)s order by e.id

-- name: before
select b.* from unnest(%(series)s::text[], %(place)s::text[], %(expected)s::text[], %(min_gap)s::float8[], %(partial)s::boolean[],
                       %(on_failed)s::text[], %(on_absent)s::text[])
       with ordinality p (series, place, expected, min_gap, partial, on_failed, on_absent, n)
 cross join lateral runguard.may_follow(%(deployment)s, p.series, p.place, p.expected, make_interval(secs => p.min_gap), p.partial,
                                        p.on_failed, p.on_absent) b
 order by p.n

-- Which of these places may begin, or never will. Those whose previous one is plainly still at it are left out first, all
-- together: a thousand sensors ask twice a second.
-- name: due_places
select p.n::int as n
  from unnest(%(series)s::text[], %(place)s::text[], %(expected)s::text[], %(min_gap)s::float8[], %(partial)s::boolean[],
              %(on_failed)s::text[], %(on_absent)s::text[])
       with ordinality p (series, place, expected, min_gap, partial, on_failed, on_absent, n)
  left join runguard.place l on l.deployment = %(deployment)s and l.series = p.series and l.place = p.expected
  left join runguard.record r on r.id = l.record_id
  left join runguard.record d on l.record_id is null and d.deployment = %(deployment)s and d.namespace = p.series and d.key = p.expected
 cross join lateral runguard.may_follow(%(deployment)s, p.series, p.place, p.expected, make_interval(secs => p.min_gap), p.partial,
                                        p.on_failed, p.on_absent) b
 where case coalesce(r.state, (select t.state from runguard.record t where t.id = d.renamed_to), d.state, 'absent')
           when 'running' then false
           when 'pending' then false
           when 'done' then true
           when 'absent' then coalesce(p.expected, '') = '' or p.on_absent <> 'wait'
           else p.on_failed <> 'wait' end
   and b.verdict <> 'wait'

-- name: take_turn
select * from runguard.take_turn(%(deployment)s, %(series)s, %(place)s, %(expected)s, make_interval(secs => %(min_gap)s), %(partial)s,
                                 %(on_failed)s, %(on_absent)s, %(namespace)s, %(key)s, %(actor)s)

-- name: take_place
select runguard.take_place(%(deployment)s, %(series)s, %(place)s, %(record_id)s, %(waits)s) as mine

-- name: observe
select * from runguard.observe(
    %(deployment)s, %(namespace)s, %(key)s, %(payload_version)s::smallint, %(payload_digest)s, %(payload_fields)s,
    %(payload_readable)s, %(store_result)s, %(what)s, %(nonce)s, %(ti_id)s, %(dag_id)s, %(task_id)s, %(run_id)s,
    %(try_number)s::int, %(map_index)s::int, %(host)s, %(pid)s::int, %(actor)s, make_interval(secs => %(max_hold)s), %(partition)s,
    %(class)s, %(effect)s, %(error)s, %(result)s::bytea, %(missing)s)

-- name: airflow_was_told
select runguard.airflow_was_told(%(deployment)s, %(namespace)s, %(key)s, %(ti_id)s, %(word)s, %(actor)s, %(detail)s) as state

-- name: audit_twice
select e.at, r.namespace, r.key, e.detail::json ->> 'run_id' as run_id, e.reason
  from runguard.event e join runguard.record r on r.id = e.record_id
 where r.deployment = %(deployment)s and e.at >= %(since)s and e.kind = 'observed_again'
   and e.detail::json ->> 'what' = 'done' and e.detail::json ->> 'verdict' = 'duplicate'
 order by e.id limit %(limit)s

-- name: audit_slow
with took as (
    select r.namespace, r.key, r.state, r.updated_at,
           extract(epoch from coalesce(r.finished_at, clock_timestamp()) - r.claimed_at)::float8 as seconds
      from runguard.record r
     where r.deployment = %(deployment)s and r.state in ('done', 'running') and r.claimed_at is not null
), middle as (
    select t.namespace, count(*) as runs, percentile_cont(0.5) within group (order by t.seconds) as median
      from took t where t.state = 'done' group by t.namespace
), spread as (
    select t.namespace, percentile_cont(0.5) within group (order by abs(t.seconds - m.median)) as mad
      from took t join middle m using (namespace) where t.state = 'done' group by t.namespace
)
select t.namespace, t.key, t.state, t.seconds, m.median, s.mad, a.alarm
  from took t left join middle m using (namespace) left join spread s using (namespace)
 cross join lateral (select coalesce(j ->> t.namespace, j ->> '')::float8 as alarm from (values (%(alarms)s::jsonb)) v (j)) a
 where t.updated_at >= %(since)s
   and (t.seconds > a.alarm
        or (m.runs >= 8 and t.seconds > m.median + 6 * greatest(1.4826 * s.mad, 0.05 * m.median, 1.0)))
 order by t.seconds desc limit %(limit)s

-- name: audit_bursts
with errors as (
    select r.namespace, e.at, e.reason,
           count(*) over (partition by r.namespace order by e.at range between interval '10 minutes' preceding and current row) as near
      from runguard.event e join runguard.record r on r.id = e.record_id
     where r.deployment = %(deployment)s and e.at >= %(since)s and e.kind in ('failed', 'in_doubt', 'poison', 'observed_failed')
)
select distinct on (x.namespace) x.namespace, x.at, x.near::int as errors, x.reason
  from errors x where x.near >= %(burst)s::int order by x.namespace, x.near desc, x.at limit %(limit)s

-- name: audit_stuck
select r.namespace, r.key, r.state, r.updated_at, r.error,
       extract(epoch from clock_timestamp() - case r.state when 'running' then r.lease_until when 'paused' then r.resume_at
                                                           else r.updated_at end)::float8 as seconds
  from runguard.record r
 where r.deployment = %(deployment)s and r.state <> 'done' and r.renamed_to is null
   and case r.state when 'running' then runguard.believed_until(r) < clock_timestamp() - interval '10 minutes'
                    when 'paused' then r.resume_at < clock_timestamp() - interval '1 hour'
                    else r.updated_at < clock_timestamp() - make_interval(secs => %(stuck_after)s) end
 order by r.id limit %(limit)s

-- name: audit_told
select e.at, r.namespace, r.key, r.state, e.reason as word, e.actor
  from runguard.event e join runguard.record r on r.id = e.record_id
 where r.deployment = %(deployment)s and e.at >= %(since)s and e.kind = 'airflow_was_told'
   and case e.reason when 'success' then r.state <> 'done' when 'failed' then r.state = 'done' else r.state = 'done' end
 order by e.id limit %(limit)s

-- name: audit_recent
select r.id, r.namespace, r.key, r.state, r.failure_class, r.ti_id, r.dag_id, r.task_id, r.run_id, r.map_index
  from runguard.record r
 where r.deployment = %(deployment)s and r.updated_at >= %(since)s and r.id > %(after)s and r.dag_id <> '' and r.run_id <> ''
   and r.state in ('done', 'paused', 'in_doubt', 'failed')
 order by r.id limit %(limit)s

-- name: standing
select r.state, coalesce(r.failure_class, '') as failure_class, count(*)::bigint as records,
       extract(epoch from clock_timestamp() - min(r.updated_at))::float8 as oldest
  from runguard.record r where r.deployment = %(deployment)s and r.state <> 'done' and r.renamed_to is null group by 1, 2

-- name: note_difference
select runguard.note_difference(%(record_id)s::bigint, %(generation)s::int, %(kind)s, %(actor)s, %(reason)s, %(detail)s) as new

-- name: lines
select c.*, runguard.attachable(c) as attachable, r.namespace, r.key
  from runguard.call c join runguard.record r on r.id = c.record_id
 where r.deployment = %(deployment)s and c.intent_at >= %(begin)s and c.first_intent_at < %(end)s
   and (%(namespace)s::text is null or r.namespace = %(namespace)s)
   and (%(dag_id)s::text is null or r.dag_id = %(dag_id)s)
 order by c.record_id, c.generation, c.name

-- name: begin_batch
select runguard.begin_batch(%(record_id)s, %(generation)s::int, %(fence)s, %(nonce)s) as held

-- name: plan
select p.verdict, p.at, p.until, array_to_string(p.said, E'\x1f') as said
  from runguard.plan(%(record_id)s, %(generation)s::int, %(fence)s, %(nonce)s, %(actor)s, make_interval(secs => %(lease)s),
    %(max_claims)s::int, make_interval(secs => %(key_lifetime)s::float8),
    string_to_array(%(names)s, E'\x1f'), string_to_array(%(digests)s, E'\x1f')) p

-- name: write_items
select * from runguard.write_items(%(record_id)s, %(generation)s::int, %(fence)s, %(nonce)s, %(actor)s,
    make_interval(secs => %(lease)s), make_interval(secs => %(max_call_time)s),
    string_to_array(%(done)s, E'\x1f'), string_to_array(%(results)s, E'\x1f')::bytea[],
    string_to_array(%(calls)s, E'\x1f'), string_to_array(%(intents)s, E'\x1f'))

-- name: progress
update runguard.record r set progress = %(progress)s
 where r.id = %(record_id)s and r.fence = %(fence)s and r.nonce = %(nonce)s and r.state = 'running' returning r.id

-- name: count_items
select c.state, c.failure_class, count(*) as items,
       max(extract(epoch from c.resume_at - clock_timestamp()))::float8 as resume_after
  from runguard.call c
 where c.record_id = %(record_id)s and c.generation = %(generation)s::int and (%(planned)s::bigint is null or c.planned = %(planned)s)
 group by c.state, c.failure_class
 union all
select 'done', null, count(distinct n.name), null from runguard.listed l, unnest(l.names) n (name)
 where l.record_id = %(record_id)s and l.fence = %(planned)s::bigint having count(*) > 0

-- name: items
select c.*, runguard.attachable(c) as attachable from runguard.call c
 where c.record_id = %(record_id)s and c.generation = %(generation)s::int and c.name > %(after)s
   and (%(state)s::text is null and %(names)s::text[] is null or runguard.selected(c, %(state)s, %(class)s, %(names)s::text[]))
   and (%(planned)s::bigint is null or c.planned = %(planned)s)
 order by c.name limit %(limit)s

-- The next names that the list of one entry named of what is done. A list lies in no order, so each asking reads all of it:
-- ask for many. A name that it has twice comes twice.
-- name: names_of_list
select x.name from (
    select c.name::text from runguard.call c
     where c.record_id = %(record_id)s and c.generation = %(generation)s::int and c.planned = %(planned)s
       and c.state = 'done' and c.name > %(after)s
    union all
    select n.name from runguard.listed l, unnest(l.names) n (name)
     where l.record_id = %(record_id)s and l.fence = %(planned)s and n.name > %(after)s) x
 order by x.name limit %(limit)s

-- name: done_items
select c.* from unnest(%(names)s::text[]) n (name) join runguard.call c on c.name = n.name
 where c.record_id = %(record_id)s and c.generation = %(generation)s::int and c.state = 'done' order by c.name

-- How many items are done, how many of them the list of one entry named, and whether what it named is still known of those
-- that were done before.
-- name: done_of_list
select count(*) as done, count(*) filter (where c.planned = %(planned)s or n.name is not null) as named,
       exists (select from runguard.listed l where l.record_id = %(record_id)s and l.fence = %(planned)s) as kept
  from runguard.call c left join (select distinct n.name from runguard.listed l, unnest(l.names) n (name)
                                   where l.record_id = %(record_id)s and l.fence = %(planned)s) n on n.name = c.name
 where c.record_id = %(record_id)s and c.generation = %(generation)s::int and c.state = 'done'

-- name: resolve_items
select * from runguard.resolve_items(%(record_id)s, %(seen_fence)s::bigint, %(answer)s, %(state)s, %(class)s, %(names)s::text[],
    %(results)s::bytea[], %(reference)s, %(actor)s, %(reason)s, %(force)s, %(nonce)s, %(known_by)s::timestamptz)

-- name: reopen_items
select * from runguard.reopen_items(%(record_id)s, %(seen_generation)s::int, %(seen_fence)s::bigint, %(state)s, %(class)s,
    %(names)s::text[], %(again_although_applied)s, %(actor)s, %(reason)s)

-- name: accept_items
select * from runguard.accept_items(%(record_id)s, %(seen_fence)s::bigint, %(state)s, %(class)s, %(names)s::text[],
    %(actor)s, %(reason)s)
