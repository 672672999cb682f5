-- A batch: many calls (its items) under one record (P1-P9, P11). An item's line is planned before anything is called and
-- carries its own state, so that doubt, pauses and failures are the item's: the record of a batch is entered again
-- although items are in doubt, and after it is done (its list may have grown). Doubt that is not any item's (a ledger that
-- lost time, a repaired line) is counted in late_applied, as everywhere: then nothing is called.

create or replace function runguard.doubt_is_its_items(r runguard.record) returns boolean language sql stable as $$
    select r.calls = 'batch' and r.late_applied = 0 and exists (select from runguard.call c
            where c.record_id = r.id and c.generation = r.generation and c.state in ('started', 'in_doubt'))
$$;

-- Done by a person's word and not item by item: then its list is not looked at again.
create or replace function runguard.calls_by_hand(p_calls text) returns text language sql immutable as $$
    select case when p_calls = 'batch' then 'explicit' else p_calls end
$$;

-- Items that were being called when their holder left: nobody knows. Their own caller may still settle them.
create or replace function runguard.doubt_open_items(r runguard.record, p_why text) returns void language sql as $$
    update runguard.call c set state = 'in_doubt', effect = 'unknown', failure_class = coalesce(c.failure_class, 'unknown'),
           first_unknown_at = coalesce(c.first_unknown_at, clock_timestamp()),
           no_later_than = greatest(c.no_later_than, r.no_later_than), error = coalesce(nullif(p_why, ''), c.error)
     where c.record_id = r.id and c.generation = r.generation and c.state = 'started'
$$;

-- After items of a record in doubt were settled: the last one takes the record out of doubt.
create or replace function runguard.settle_batch_doubt(r runguard.record, p_actor text) returns runguard.record
language plpgsql as $$
begin
    if r.state = 'in_doubt' and r.late_applied = 0 and not runguard.doubt_is_its_items(r) then
        update runguard.record k set state = 'pending', effect = null, failure_class = null, needs_person = false,
               open_calls = 0, no_later_than = null, first_unknown_at = null, claims = 0
         where k.id = r.id returning * into r;
    elsif r.state = 'in_doubt' then
        update runguard.record k set open_calls = (select count(*) from runguard.call c where c.record_id = r.id
               and c.generation = r.generation and c.fence = r.fence and c.state in ('started', 'in_doubt') and c.outcome_at is null)
         where k.id = r.id returning * into r;
    end if;
    return r;
end $$;

-- Whether this entry holds the record, whose row the caller has locked.
create or replace function runguard.holds(r runguard.record, p_generation integer, p_fence bigint, p_nonce text)
returns boolean language sql stable as $$
    select coalesce(r.fence = p_fence and r.generation = p_generation and r.nonce = p_nonce and r.state = 'running'
                    and runguard.broken(r) = '', false)
$$;

-- The first thing that a batch does: what an earlier entry left open is in doubt from here on.
create or replace function runguard.begin_batch(
    p_record_id bigint, p_generation integer, p_fence bigint, p_nonce text
) returns boolean language plpgsql as $$
declare
    r runguard.record;
begin
    perform runguard.pin();
    perform runguard.open_for_writing();
    select * into r from runguard.record k where k.id = p_record_id for update;
    if not runguard.holds(r, p_generation, p_fence, p_nonce) then
        return false;
    end if;
    perform runguard.doubt_open_items(r, 'its holder was gone before an answer came');
    return true;
end $$;

-- Plans a chunk of items, and renews the lease. Says of each: 'work' (it may be called), 'done', 'in_doubt', 'paused',
-- 'failed' (only a person's reopen sends it again: what was wrong with it is still wrong, or it kills its worker),
-- 'changed' (begun with another payload: refused, its line as it was), 'conflict' (the list names it twice, differently).
-- No payload_digest: a person accepted whatever payload comes next, which is bound here.
-- The record's row is locked, so nobody else writes a line of it meanwhile. Lines are written in key order, and those that
-- are done are not written at all: that the list named them stands in listed.
-- The first list is planned before PostgreSQL knows how many lines there are; it would compare each with each.
create or replace function runguard.plan(
    p_record_id bigint, p_generation integer, p_fence bigint, p_nonce text, p_actor text, p_lease interval,
    p_max_claims integer, p_key_lifetime interval, p_names text[], p_digests text[]
) returns table (verdict text, at timestamptz, until timestamptz, said text[]) language plpgsql
set enable_seqscan = off set enable_nestloop = off set jit = off as $$
#variable_conflict use_column
declare
    r        runguard.record;
    v_now    timestamptz;
    v_said   text[];
    v_new    text[];
    v_listed text[];
    v_again  boolean;
    v_poison text[];
begin
    perform runguard.pin();
    perform runguard.open_for_writing();
    select * into r from runguard.record k where k.id = p_record_id for update;
    v_now := clock_timestamp();
    if not runguard.holds(r, p_generation, p_fence, p_nonce) or v_now >= r.hold_until then
        return query select 'lost', v_now, null::timestamptz, null::text[];
        return;
    end if;
    with known as materialized (
        select c.name, c.state, c.claims, c.planned is distinct from p_fence as again,
               c.first_intent_at is null and c.state = 'pending' as fresh,
               c.payload_digest is null as accepted, c.final and c.state in ('pending', 'paused') as bound_anew,
               case when c.payload_digest <> t.digest then 'other'
                    when c.state = 'failed' then case when c.effect = 'not_applied' and c.claims < p_max_claims
                        and c.failure_class not in ('validation', 'planning') then 'work' else 'failed' end
                    when c.state = 'paused' then case when c.resume_at <= v_now then 'work' else 'paused' end
                    when c.state = 'in_doubt' then case when c.claims < p_max_claims and runguard.may_resend(c, p_key_lifetime)
                        then 'work' else 'in_doubt' end
                    when c.state = 'started' then 'in_doubt'
                    else c.state end as word
          from unnest(p_names, p_digests) t (name, digest) join runguard.call c on c.name = t.name
         where c.record_id = r.id and c.generation = r.generation and c.name = any (p_names)
    )
    select array_agg(case when k.name is null then 'work'
                          when k.word = 'other' and (k.fresh or k.bound_anew) and not k.again then 'conflict'
                          when k.fresh then case when k.claims < p_max_claims then 'work' else 'poison' end
                          when k.word = 'other' then 'changed'
                          when k.word = 'pending' then case when k.claims < p_max_claims then 'work' else 'poison' end
                          else k.word end order by t.place),
           array_agg(t.name) filter (where k.name is null),
           array_agg(t.name) filter (where k.state = 'done' and k.again),
           coalesce(bool_or(k.accepted or (k.state <> 'done' and k.again)), false)
      into v_said, v_new, v_listed, v_again
      from unnest(p_names) with ordinality t (name, place) left join known k on k.name = t.name;
    if v_new is not null then
        insert into runguard.call (record_id, generation, name, state, fence, payload_digest, planned)
        select r.id, r.generation, t.name, 'pending', 0, t.digest, p_fence
          from unnest(v_new) n (name) join unnest(p_names, p_digests) t (name, digest) on t.name = n.name order by t.name;
    end if;
    if v_listed is not null then
        insert into runguard.listed (record_id, fence, names) values (r.id, p_fence, v_listed);
    end if;
    if v_again then
        update runguard.call c set planned = case when c.state = 'done' then c.planned else p_fence end,
               payload_digest = case when c.payload_digest is null or (c.first_intent_at is null and c.state = 'pending')
                                     then t.digest else c.payload_digest end
          from unnest(p_names, p_digests) t (name, digest)
         where c.record_id = r.id and c.generation = r.generation and c.name = t.name and c.name = any (p_names)
           and (c.payload_digest is null or (c.state <> 'done' and c.planned is distinct from p_fence));
    end if;
    if 'poison' = any (v_said) then
        with poison as (
            update runguard.call c set state = 'failed', failure_class = 'processing', effect = 'not_applied', outcome_at = v_now,
                   error = format('called %s times without any outcome: something kills its worker', c.claims)
             where c.record_id = r.id and c.generation = r.generation and c.name = any (p_names)
               and c.state = 'pending' and c.claims >= p_max_claims
            returning c.name
        ) select array_agg(p.name order by p.name) into v_poison from poison p;
        perform runguard.book(r, 'poison', p_actor, 'these items kill their worker; they are set aside, the others go on',
                              json_build_object('items', v_poison)::text);
        v_said := array_replace(v_said, 'poison', 'failed');
    end if;
    update runguard.record k set lease_until = least(v_now + p_lease, k.hold_until) where k.id = r.id returning * into r;
    return query select 'ok', v_now, r.lease_until, v_said;
end $$;

-- What almost every group of a batch is: items that were never unknown and are done, and intents of items that are neither
-- in doubt nor submitted. One statement, whose plan is kept, since what it costs is being set up: it locks the record's
-- row, writes the lines that are plain, and then the row, all as write() and start_call() would. Answers which lines those were; no row = none, or this
-- holder may not. Whatever is not so plain is left to write(), which the caller asks next.
create or replace function runguard.write_items(
    p_record_id bigint, p_generation integer, p_fence bigint, p_nonce text, p_actor text, p_lease interval,
    p_max_call_time interval, p_done text[], p_results bytea[], p_calls text[], p_intents text[]
) returns table (at timestamptz, until timestamptz, event_id bigint, answered text[], called text[], attempts integer[])
language plpgsql set plan_cache_mode = force_generic_plan set enable_seqscan = off as $$
#variable_conflict use_column
begin
    return query
    with held as (
        select k.id, k.deployment, k.namespace, k.key, k.dag_id, k.gate, k.store_result, k.hold_until
          from runguard.record k
         where k.id = p_record_id and k.generation = p_generation and k.fence = p_fence and k.nonce = p_nonce
           and k.state = 'running' and k.calls = 'batch' and k.late_applied = 0
           and current_setting('transaction_isolation') = 'read committed' and runguard.broken(k) = '' and runguard.opened()
           for no key update of k),
    r as materialized (                         -- what the clock says after the lock, which it may have had to wait for
        select h.*, clock_timestamp() as at from held h),
    o as (
        update runguard.call c set state = 'done', effect = 'applied', outcome_at = r.at, failure_class = null,
               same_again = false, final = false, claims = 0, error = '', evidence = '', result_missing = null,
               result = case when r.store_result = 'all' then t.result end,
               result_digest = case when r.store_result <> 'none' then sha256(t.result) end
          from r, unnest(p_done, p_results) t (name, result)
         where c.record_id = r.id and c.generation = p_generation and c.name = t.name
           and c.name = any (p_done)            -- said again for the planner: by the index, whatever it believes
           and c.fence = p_fence and c.state = 'started' and c.first_unknown_at is null
        returning c.name::text as name),
    i as (
        update runguard.call c set state = 'started', fence = p_fence, intent = t.intent, intent_at = r.at,
               no_later_than = r.at + p_max_call_time, outcome_at = null, resume_at = null, attempt = c.attempt + c.final::int,
               final = false, claims = c.claims + 1,
               first_intent_at = case when c.final or c.first_intent_at is null then r.at else c.first_intent_at end,
               gate_epoch = case when r.gate is not null then runguard.gate_epoch(r.deployment, r.gate) end
          from r, runguard.meta m, unnest(p_calls, p_intents) t (name, intent)
         where c.record_id = r.id and c.generation = p_generation and c.name = t.name and c.name = any (p_calls)
           and not c.submitted and (c.fence < p_fence and (c.state = 'pending' or c.state = 'failed' and c.effect = 'not_applied')
                                    or c.state = 'paused' and c.resume_at <= r.at)
           and r.at < r.hold_until and runguard.lost_time(m) = ''
           and r.at < statement_timestamp() + interval '50 ms'  -- else it waited for the row, and what forbids it may be news
           and (m.freezes = 0 or runguard.frozen(r.deployment, r.dag_id, r.namespace, r.key) is null)
           and (r.gate is null or runguard.gate_until(r.deployment, r.gate, true) is null)
        returning c.name::text as name, c.attempt),
    n as materialized (
        select d.names as done, b.names as begun, b.attempts, d.n as closed, b.n as opened
          from (select array_agg(o.name) as names, count(*)::int as n from o) d,
               (select array_agg(i.name) as names, array_agg(i.attempt) as attempts, count(*)::int as n from i) b),
    written as (
        update runguard.record k set open_calls = k.open_calls - n.closed + n.opened, claims = 0,
               lease_until = least(r.at + p_lease, k.hold_until), handed_over = false,
               no_later_than = case when k.open_calls - n.closed + n.opened > 0      -- it lives, so it may still send
                                    then greatest(k.no_later_than, r.at + p_max_call_time) else k.no_later_than end,
               first_intent_at = case when n.opened > 0 then coalesce(k.first_intent_at, r.at) else k.first_intent_at end,
               pauses = case when n.closed > 0 then 0 else k.pauses end,
               paused_since = case when n.closed > 0 then null else k.paused_since end
          from r, n where k.id = r.id and k.id = p_record_id and n.closed + n.opened > 0
        returning k.lease_until),
    e as (
        insert into runguard.event (record_id, generation, fence, kind, actor, detail, mark)
        select r.id, p_generation, p_fence, v.kind, p_actor, json_build_object('names', v.names)::text, p_nonce
          from r, n, lateral (values ('items_answered', n.done), ('items_called', n.begun)) v (kind, names)
         where v.names is not null returning id)
    select r.at, w.lease_until, (select max(e.id) from e), n.done, n.begun, n.attempts from r, n, written w;
end $$;

-- -- what people (and reconcilers) may change (P13) -------------------------------------------------------------------

-- Whether an item is selected: by state (and failure class), by name, or both; an empty selection selects nothing.
create or replace function runguard.selected(c runguard.call, p_state text, p_class text, p_names text[]) returns boolean
language sql immutable as $$
    select coalesce((p_state is null or c.state = p_state or (p_state = 'in_doubt' and c.state = 'started'))
                    and (p_class is null or c.failure_class = p_class)
                    and (p_names is null or c.name = any (p_names))
                    and (p_state is not null or p_names is not null), false)
$$;

-- Says what became of items in doubt; 'happened' also of failed ones, and with a result of those that are done but lack
-- theirs. p_results = null: there is no result; one for each name otherwise. p_known_by: it speaks of no doubt
-- that is younger (null = of all). p_nonce: the holder itself says it, of a running batch, for its reconciler. Items whose request may still
-- reach the vendor are left as they are ('early' counts them), unless forced.
create or replace function runguard.resolve_items(
    p_record_id bigint, p_seen_fence bigint, p_answer text, p_state text, p_class text, p_names text[], p_results bytea[],
    p_reference text, p_actor text, p_reason text, p_force boolean, p_nonce text, p_known_by timestamptz
) returns table (verdict text, items integer, early integer) language plpgsql as $$
#variable_conflict use_column
declare
    r       runguard.record;
    v_now   timestamptz;
    v_early integer;
    v_done  text[];
    v_names text[] := nullif(array_remove(p_names, null), '{}');
begin
    if p_answer not in ('happened', 'did_not_happen', 'failed') then
        raise exception 'an answer is happened, did_not_happen or failed, not %', p_answer;
    end if;
    perform runguard.pin();
    perform runguard.open_for_writing();
    select * into r from runguard.record k where k.id = p_record_id for update;
    v_now := clock_timestamp();
    verdict := case when not found then 'missing'
                    when r.calls <> 'batch' then 'no_batch'
                    when runguard.broken(r) <> '' then 'broken'
                    when p_seen_fence is not null and r.fence <> p_seen_fence then 'moved'
                    when p_nonce is not null and (r.nonce is distinct from p_nonce or r.state <> 'running') then 'moved' end;
    if verdict is not null then
        return next;
        return;
    end if;
    select count(*) into v_early from runguard.call c
     where c.record_id = r.id and c.generation = r.generation and runguard.selected(c, p_state, p_class, v_names)
       and p_answer = 'did_not_happen' and not p_force and c.no_later_than > v_now and c.state in ('started', 'in_doubt')
       and coalesce(c.first_unknown_at <= p_known_by, true);
    with changed as (
        update runguard.call c set
               state = case p_answer when 'happened' then 'done' when 'failed' then 'failed' else 'pending' end,
               effect = case p_answer when 'happened' then 'applied' when 'failed' then 'unknown' else 'not_applied' end,
               failure_class = case when p_answer = 'failed' then coalesce(c.failure_class, 'unknown') end,
               outcome_at = v_now, first_unknown_at = null, same_again = false, late_applied = false, earlier_key = false,
               external_id = coalesce(p_reference, c.external_id),
               result = case when p_answer = 'happened' and r.store_result = 'all' then g.result end,
               result_digest = case when p_answer = 'happened' and r.store_result <> 'none' then sha256(g.result) end,
               result_missing = case when p_answer = 'happened' and r.store_result <> 'none' and g.result is null
                                     then 'resolved by hand without a result' end
          from runguard.call s
          left join unnest(v_names, p_results) g (name, result) on g.name = s.name
         where s.record_id = r.id and s.generation = r.generation and runguard.selected(s, p_state, p_class, v_names)
           and c.record_id = s.record_id and c.generation = s.generation and c.name = s.name
           and (c.state = 'in_doubt' or (c.state = 'started' and r.state <> 'running')
                or (c.state = 'failed' and p_answer = 'happened')
                or (runguard.lacks_result(c) and p_answer = 'happened' and g.result is not null))
           and not (p_answer = 'did_not_happen' and not p_force and coalesce(c.no_later_than > v_now, false))
           and coalesce(c.first_unknown_at <= p_known_by, true)
        returning c.name
    ) select array_agg(x.name order by x.name) into v_done from changed x;
    items := coalesce(cardinality(v_done), 0);
    early := v_early;
    verdict := case when items > 0 then 'ok' when v_early > 0 then 'too_early' else 'no_such_call' end;
    if items > 0 then
        r := runguard.settle_batch_doubt(r, p_actor);
        perform runguard.book(r, 'items_resolved', p_actor, p_reason, json_build_object('answer', p_answer, 'items', items,
            'names', v_done[1:100], 'reference', p_reference, 'forced', p_force)::text);
    end if;
    return next;
end $$;

-- Orders items anew, each under a new vendor key and with whatever payload the next list has for it. What had its effect
-- (or may have) only with p_again_although_applied. The record stays where it is: the next run enters it.
create or replace function runguard.reopen_items(
    p_record_id bigint, p_seen_generation integer, p_seen_fence bigint, p_state text, p_class text, p_names text[],
    p_again_although_applied boolean, p_actor text, p_reason text
) returns table (verdict text, items integer, early integer) language plpgsql as $$
#variable_conflict use_column
declare
    r         runguard.record;
    s         record;
    v_applied integer;
    v_done    text[];
begin
    select * into s from runguard.look(p_record_id, p_seen_fence);
    r := s.r;
    verdict := coalesce(s.refused, case when r.calls <> 'batch' then 'no_batch'
                                        when r.generation <> p_seen_generation then 'moved'
                                        when r.state = 'running' then 'not_finished' end);
    if verdict is not null then
        return next;
        return;
    end if;
    select count(*) into v_applied from runguard.call c
     where c.record_id = r.id and c.generation = r.generation and runguard.selected(c, p_state, p_class, p_names)
       and c.state in ('failed', 'done') and c.effect is distinct from 'not_applied' and not p_again_although_applied;
    with changed as (
        update runguard.call c set state = 'pending', attempt = c.attempt + 1, final = false, fence = 0, claims = 0,
               first_intent_at = null, intent_at = null, no_later_than = null, outcome_at = null, resume_at = null,
               effect = null, failure_class = null, same_again = false, late_applied = false, earlier_key = false, result = null, result_digest = null,
               result_missing = null, error = '', evidence = ''
         where c.record_id = r.id and c.generation = r.generation and runguard.selected(c, p_state, p_class, p_names)
           and c.state in ('failed', 'done') and (c.effect = 'not_applied' or p_again_although_applied)
        returning c.name
    ) select array_agg(x.name order by x.name) into v_done from changed x;
    items := coalesce(cardinality(v_done), 0);
    early := v_applied;
    verdict := case when items > 0 then 'ok' when v_applied > 0 then 'applied' else 'no_such_call' end;
    if items > 0 then
        perform runguard.book(r, 'items_reopened', p_actor, p_reason, json_build_object('items', items, 'names', v_done[1:100],
            'although_applied', p_again_although_applied)::text);
    end if;
    return next;
end $$;

-- Lets the next list bring another payload for items: one that is done then answers to it, one that provably had no effect
-- is called with it under a new vendor key. Items whose effect is unknown are left.
create or replace function runguard.accept_items(
    p_record_id bigint, p_seen_fence bigint, p_state text, p_class text, p_names text[], p_actor text, p_reason text
) returns table (verdict text, items integer, early integer) language plpgsql as $$
#variable_conflict use_column
declare
    r         runguard.record;
    s         record;
    v_unknown integer;
    v_done    text[];
begin
    select * into s from runguard.look(p_record_id, p_seen_fence);
    r := s.r;
    verdict := coalesce(s.refused, case when r.calls <> 'batch' then 'no_batch'
                                        when r.state = 'running' then 'unknown_effect' end);
    if verdict is not null then
        return next;
        return;
    end if;
    select count(*) into v_unknown from runguard.call c
     where c.record_id = r.id and c.generation = r.generation and runguard.selected(c, p_state, p_class, p_names)
       and (c.state in ('started', 'in_doubt') or (c.state = 'failed' and c.effect is distinct from 'not_applied'));
    with changed as (
        update runguard.call c set payload_digest = null, final = c.state <> 'done',
               state = case when c.state = 'failed' then 'pending' else c.state end,
               failure_class = case when c.state <> 'failed' then c.failure_class end,
               claims = 0
         where c.record_id = r.id and c.generation = r.generation and runguard.selected(c, p_state, p_class, p_names)
           and (c.state = 'done' or (c.state in ('failed', 'paused') and c.effect = 'not_applied')
                or (c.state = 'pending' and c.first_intent_at is not null))
        returning c.name
    ) select array_agg(x.name order by x.name) into v_done from changed x;
    items := coalesce(cardinality(v_done), 0);
    early := v_unknown;
    verdict := case when items > 0 then 'ok' when v_unknown > 0 then 'unknown_effect' else 'no_such_call' end;
    if items > 0 then
        perform runguard.book(r, 'items_accepted', p_actor, p_reason,
                              json_build_object('items', items, 'names', v_done[1:100])::text);
    end if;
    return next;
end $$;
