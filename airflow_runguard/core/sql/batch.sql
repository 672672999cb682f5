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
               and c.generation = r.generation and c.state in ('started', 'in_doubt') and c.outcome_at is null)
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
               case when c.payload_digest is distinct from t.digest then 'other'
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
                          when k.fresh and k.word = 'other' and not k.again then 'conflict'
                          when k.fresh then case when k.claims < p_max_claims then 'work' else 'poison' end
                          when k.word = 'other' then 'changed'
                          when k.word = 'pending' then case when k.claims < p_max_claims then 'work' else 'poison' end
                          else k.word end order by t.place),
           array_agg(t.name) filter (where k.name is null),
           array_agg(t.name) filter (where k.state = 'done' and k.again),
           coalesce(bool_or(k.state <> 'done' and k.again), false)
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
        update runguard.call c set planned = p_fence,
               payload_digest = case when c.first_intent_at is null and c.state = 'pending' then t.digest else c.payload_digest end
          from unnest(p_names, p_digests) t (name, digest)
         where c.record_id = r.id and c.generation = r.generation and c.name = t.name and c.name = any (p_names)
           and c.state <> 'done' and c.planned is distinct from p_fence;
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

-- What almost every group of a batch is: plain outcomes of items that were never unknown, and first intents of items that
-- were never begun, written by two statements for the whole group. Whatever is not so plain is left to write(), one by
-- one; the row of the record is locked, and the caller has looked that this holder may write.
create or replace function runguard.write_items(
    r runguard.record, p_now timestamptz, p_actor text, p_nonce text,
    p_o_name text[], p_o_state text[], p_o_class text[], p_o_effect text[], p_o_final boolean[], p_o_error text[],
    p_o_evidence text[], p_o_result bytea[], p_o_missing text[], p_i_name text[], p_i_intent text[], p_max_call_time interval,
    out answered text[], out done boolean, out called text[], out attempts integer[], out event_id bigint
) language plpgsql as $$
begin
    if cardinality(p_o_name) > 0 then
        with changed as (
            update runguard.call k set state = o.state, outcome_at = p_now, failure_class = o.class, effect = o.effect,
                   same_again = false, final = coalesce(o.final, false) and o.state = 'failed', claims = 0,
                   error = coalesce(o.error, ''), evidence = coalesce(o.evidence, ''),
                   result = case when r.store_result = 'all' then o.result end,
                   result_digest = case when r.store_result <> 'none' then sha256(o.result) end, result_missing = o.missing
              from unnest(p_o_name, p_o_state, p_o_class, p_o_effect, p_o_final, p_o_error, p_o_evidence, p_o_result, p_o_missing)
                   o (name, state, class, effect, final, error, evidence, result, missing)
             where k.record_id = r.id and k.generation = r.generation and k.name = o.name and k.fence = r.fence
               and k.name = any (p_o_name)      -- said again for the planner: by the index, whatever it believes of the table
               and k.state = 'started' and k.first_unknown_at is null and o.state in ('done', 'failed')
            returning k.name, k.state
        ) select array_agg(c.name), bool_or(c.state = 'done') into answered, done from changed c;
        if answered is not null then
            event_id := runguard.book(r, 'items_answered', p_actor, '', json_build_object('names', answered)::text, p_nonce);
        end if;
    end if;
    if cardinality(p_i_name) > 0 and p_now < r.hold_until and (select runguard.lost_time(m) = '' from runguard.meta m)
       and runguard.frozen(r.deployment, r.dag_id, r.namespace, r.key) is null
       and runguard.gate_until(r.deployment, r.gate, true) is null then
        with begun as (
            update runguard.call k set state = 'started', fence = r.fence, intent = i.intent, intent_at = p_now,
                   no_later_than = p_now + p_max_call_time, first_intent_at = p_now, claims = k.claims + 1,
                   gate_epoch = runguard.gate_epoch(r.deployment, r.gate)
              from unnest(p_i_name, p_i_intent) i (name, intent)
             where k.record_id = r.id and k.generation = r.generation and k.name = i.name and k.name = any (p_i_name)
               and k.state = 'pending' and k.first_intent_at is null and not k.final
            returning k.name, k.attempt
        ) select array_agg(b.name), array_agg(b.attempt) into called, attempts from begun b;
        if called is not null then
            event_id := runguard.book(r, 'items_called', p_actor, '', json_build_object('names', called)::text, p_nonce);
        end if;
    end if;
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
               outcome_at = v_now, first_unknown_at = null, same_again = false,
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
               effect = null, failure_class = null, same_again = false, result = null, result_digest = null,
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
