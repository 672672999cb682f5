-- The one statement by which a holder changes anything after its claim (P3, P4, P5): renew the lease, book outcomes,
-- book intents, settle, hand over. All of it hangs on the record's row, locked first; whether a call is open stands on
-- that row. Repeating it after a lost answer changes nothing.
--
-- It is the long way, which decides whatever there is to decide. What almost every body and almost every group of a
-- batch is, one statement each does before it is asked (settle_body below, write_items in batch.sql): decided on the
-- record's row like everything here, they write what the long way would, and find no row in any other case.
--
-- A hand-over with an error that is not the quota (p_resume_after is null) is no progress: it starts anew what it waited with.
-- Answers one row of kind 'record' (verdict: ok | lost | missing | broken; state; at = database time; until = lease, or
-- when one that waits for its quota resumes)
-- and one of kind 'intent' for each intent (verdict: run | attach | replay | in_doubt | paused | gated | frozen | failed |
-- pending | open | lost).
--
-- An outcome 'pending' says that an item whose intent was granted was not and will not be sent: it stands again where it
-- stood, as if it had not been asked for, with all that earlier attempts left (doubt, a binding payload, its vendor key).

-- An outcome that comes after the fence moved or a person answered: kept as evidence; if it says "applied", that call is
-- in doubt (again), a record that would be run again too, and a running later holder is told before its next call.
create or replace function runguard.keep_late_outcome(
    r runguard.record, p_generation integer, p_fence bigint, p_actor text, p_call text, p_state text, p_effect text,
    p_error text, p_result bytea
) returns runguard.record language plpgsql as $$
begin
    if exists (select from runguard.event e where e.record_id = r.id and e.kind = 'late_outcome'
                  and e.fence = p_fence and e.generation = p_generation
                  and e.detail::json ->> 'call' = p_call and e.detail::json ->> 'state' = p_state) then
        return r;
    end if;
    insert into runguard.event (record_id, generation, fence, kind, actor, reason, detail)
    values (r.id, p_generation, p_fence, 'late_outcome', p_actor, p_error, json_build_object(
        'call', p_call, 'state', p_state, 'effect', p_effect, 'unheeded', runguard.broken(r) <> '',
        'result', case r.store_result when 'all' then encode(p_result, 'escape')
                                      when 'digest' then 'sha256:' || encode(sha256(p_result), 'hex') end)::text);
    return case when p_effect = 'applied' and runguard.broken(r) = ''      -- else heeded when it is repaired
                then runguard.heed_late_outcome(r, p_generation, p_fence, p_actor, p_call) else r end;
end $$;

create or replace function runguard.heed_late_outcome(
    r runguard.record, p_generation integer, p_fence bigint, p_actor text, p_call text
) returns runguard.record language plpgsql as $$
declare
    v_why text := format('call %s: a stale holder reports that it was applied', p_call);
begin
    if (r.generation <> p_generation and runguard.ordered_although_applied(r, p_generation + 1))
       or (r.state = 'done' and r.calls <> 'batch')
       or exists (select from runguard.call c where c.record_id = r.id and c.generation = r.generation
                     and c.name = p_call and c.state = 'done') then      -- nothing that is not known already
        return r;
    end if;
    -- Of an earlier generation, this one may have no line of it yet.
    insert into runguard.call (record_id, generation, name, state, fence)
    values (r.id, r.generation, p_call, 'pending', 0) on conflict do nothing;
    update runguard.call c set state = 'in_doubt', effect = 'unknown', outcome_at = clock_timestamp(),
           first_unknown_at = clock_timestamp(), error = 'a stale holder reports that it was applied'
     where c.record_id = r.id and c.generation = r.generation and c.name = p_call
       and c.state not in ('started', 'in_doubt');          -- those are unknown already, and their own caller may answer
    -- An answer from before this speaks of it no more, also where it is still open (its record may be in doubt); nor does
    -- that of one who calls it now, unless it happened. What was applied under an earlier key is neither sent again nor
    -- denied under the present one: a person decides.
    update runguard.call c set first_unknown_at = clock_timestamp(), late_applied = true,
           earlier_key = c.earlier_key or r.generation <> p_generation or c.final or (c.fence <> p_fence and c.attempt > 1)
     where c.record_id = r.id and c.generation = r.generation and c.name = p_call and c.state in ('started', 'in_doubt');
    if r.state = 'running' and r.calls = 'batch' and exists (select from runguard.call c
           where c.record_id = r.id and c.generation = r.generation and c.name = p_call and c.state = 'in_doubt') then
        return r;                               -- that item is in doubt and is not called; the others are other work
    elsif r.state = 'in_doubt' then
        update runguard.record set error = v_why where id = r.id returning * into r;
    elsif r.state = 'running' then
        update runguard.record set late_applied = late_applied + 1,
               first_unknown_at = coalesce(first_unknown_at, clock_timestamp()) where id = r.id returning * into r;
    else
        update runguard.record set state = 'in_doubt', effect = 'unknown', failure_class = 'unknown', needs_person = true,
               first_unknown_at = clock_timestamp(), resume_at = null, error = v_why, completeness = 'none', finished_at = null
         where id = r.id returning * into r;
        perform runguard.book(r, 'in_doubt', p_actor, r.error);
    end if;
    return r;
end $$;

-- Whether the person who ordered a generation knew that the one before may have happened.
create or replace function runguard.ordered_although_applied(r runguard.record, p_generation integer) returns boolean
language sql stable as $$
    select coalesce((select (e.detail::json ->> 'although_applied')::boolean from runguard.event e
                      where e.record_id = r.id and e.kind = 'reopened' and e.generation = p_generation
                      order by e.id desc limit 1), false)
$$;

-- A body that is one call and is done: the settlement speaks also for the call 'body', with the same result.
create or replace function runguard.settle_body(
    p_record_id bigint, p_generation integer, p_fence bigint, p_nonce text, p_actor text,
    p_completeness text, p_error text, p_result bytea, p_missing text
) returns table (at timestamptz, event_id bigint) language plpgsql as $$
#variable_conflict use_column
begin
    return query
    with k as (
        update runguard.record k set state = 'done', effect = 'applied', completeness = p_completeness,
               finished_at = t.at, lease_until = null, hold_until = null, handed_over = false,
               open_calls = 0, no_later_than = null, claims = 0, pauses = 0, paused_since = null,
               failure_class = null, needs_person = false, resume_at = null,
               result = case when k.store_result = 'all' then p_result end,
               result_digest = case when k.store_result <> 'none' then sha256(p_result) end,
               result_missing = p_missing, error = p_error, evidence = ''
          from (select clock_timestamp() as at) t
         where k.id = p_record_id and k.generation = p_generation and k.fence = p_fence and k.nonce = p_nonce
           and k.state = 'running' and k.open_calls = 1 and k.late_applied = 0 and k.first_unknown_at is null
           and exists (select from runguard.call c
                        where c.record_id = p_record_id and c.generation = p_generation and c.name = 'body'
                          and c.state = 'started' and c.fence = p_fence)
           and current_setting('transaction_isolation') = 'read committed' and runguard.broken(k) = ''
           and runguard.opened()
        returning k.finished_at, k.error, k.result, k.result_digest, k.result_missing),
    c as (
        update runguard.call c set state = 'done', effect = 'applied', outcome_at = k.finished_at, failure_class = null,
               first_unknown_at = null, same_again = false, final = false, claims = 0, resume_at = null, error = k.error,
               evidence = '', result = k.result, result_digest = k.result_digest, result_missing = k.result_missing
          from k where c.record_id = p_record_id and c.generation = p_generation and c.name = 'body'),
    e as (
        insert into runguard.event (record_id, generation, fence, kind, actor, reason, detail, mark)
        select p_record_id, p_generation, p_fence, 'done', p_actor, k.error, '{"evidence" : ""}', p_nonce
          from k returning id)
    select k.finished_at, e.id from k, e;
end $$;

create or replace function runguard.write(
    p_record_id bigint, p_generation integer, p_fence bigint, p_actor text, p_nonce text, p_lease interval,
    p_o_name text[], p_o_state text[], p_o_class text[], p_o_effect text[], p_o_final boolean[],
    p_o_resume_after double precision[], p_o_error text[], p_o_evidence text[], p_o_result bytea[], p_o_missing text[],
    p_i_name text[], p_i_intent text[], p_max_call_time interval, p_key_lifetime interval,
    p_to text, p_class text, p_effect text, p_needs_person boolean, p_resume_after double precision,
    p_result bytea, p_missing text, p_completeness text, p_error text, p_evidence text, p_hand_over interval,
    p_rate double precision, p_max_pauses integer, p_max_pause interval
) returns table (
    kind text, name text, verdict text, state text, attempt integer, at timestamptz, until timestamptz,
    result bytea, result_missing text, error text, event_id bigint
) language plpgsql as $$
#variable_conflict use_column
declare
    r        runguard.record;
    c        runguard.call;
    s        record;
    v_now    timestamptz;
    mine     boolean;
    live     boolean;
    closed   integer := 0;
    opened   integer := 0;
    booked   boolean := false;
    v_first  boolean;
    doubtful boolean;
    v_state  text;
    v_said   text;
    v_what   text;
    target   text;
    v_event  bigint;
    v_until  timestamptz;
    v_slot   timestamptz;                       -- until when it keeps its place in Airflow and waits for its quota
    v_spent  boolean := false;
    v_progress boolean := false;
    v_passed boolean := false;                  -- it was told to wait where it is, and has gone on from there since
    v_frozen text;
    item     boolean;
    i        integer;
begin
    perform runguard.pin();
    perform runguard.open_for_writing();
    select * into r from runguard.record k where k.id = p_record_id for update;
    v_now := clock_timestamp();
    if not found or r.fence < p_fence or r.generation < p_generation
       or (r.fence = p_fence and r.generation = p_generation and r.nonce is distinct from p_nonce) then
        -- Not there, as it was before this grant, or (its number given away again) another record: time was lost.
        return query select 'intent', n, 'lost', null::text, null::integer, v_now, null::timestamptz, null::bytea, null::text, null::text, null::bigint
                       from unnest(p_i_name) n;
        insert into runguard.event (generation, fence, kind, actor, reason, detail)
        select p_generation, p_fence, 'late_outcome', p_actor, coalesce(o.error, ''), json_build_object(
                   'lost_record', p_record_id, 'call', o.name, 'state', o.state, 'effect', o.effect,
                   'result', encode(o.result, 'escape'))::text
          from unnest(p_o_name, p_o_state, p_o_effect, p_o_error, p_o_result) o (name, state, effect, error, result);
        return query select 'record', '', 'missing', null::text, null::integer, v_now, null::timestamptz, null::bytea, null::text, null::text, null::bigint;
        return;
    end if;
    mine := r.fence = p_fence and r.generation = p_generation and r.state in ('running', 'in_doubt')
            and runguard.broken(r) = '';
    live := mine and r.state = 'running';

    -- An item's own caller may settle it also after another holder took the batch over: nobody else has called it since.
    item := not mine and r.calls = 'batch' and r.generation = p_generation and runguard.broken(r) = '';
    for i in 1 .. coalesce(array_length(p_o_name, 1), 0) loop
        select * into c from runguard.call k
         where k.record_id = r.id and k.generation = p_generation and k.name = p_o_name[i];
        if c.fence = p_fence and c.outcome_at is not null and c.state = p_o_state[i]
           and (r.store_result = 'none' or c.result_digest is not distinct from sha256(p_o_result[i])) then
            null;                               -- booked before; its answer was lost
        elsif (mine or item) and c.fence = p_fence and c.state in ('started', 'in_doubt') and c.outcome_at is null then
            v_state := p_o_state[i];
            v_said := '';
            if v_state not in ('done', 'in_doubt') and p_o_effect[i] = 'not_applied' and (c.first_unknown_at < c.intent_at or c.late_applied) then
                v_state := 'in_doubt';          -- speaks for this attempt only; the earlier one stays unknown
                v_said := 'this attempt had no effect, an earlier one is still unknown; ';
            end if;
            if p_o_state[i] = 'pending' then
                -- The first intent of this order of it: under attempt 1, or since it was ordered anew, nothing was known of it.
                v_first := v_state = 'pending' and c.first_intent_at = c.intent_at and (c.attempt = 1 or c.effect is null);
                update runguard.call k set state = v_state, outcome_at = v_now, claims = greatest(k.claims - 1, 0),
                       intent = case when not v_first then k.intent end, intent_at = case when not v_first then k.intent_at end,
                       first_intent_at = case when not v_first then k.first_intent_at end,
                       no_later_than = case when v_state = 'in_doubt' then k.no_later_than end,
                       first_unknown_at = case when v_state = 'in_doubt' then coalesce(k.first_unknown_at, v_now) end,
                       failure_class = case when v_state = 'in_doubt' then coalesce(k.failure_class, 'unknown') end,
                       effect = case when v_state = 'in_doubt' then 'unknown' when not v_first then 'not_applied' end,
                       error = case when v_state = 'in_doubt' then k.error else '' end,
                       evidence = case when v_state = 'in_doubt' and k.evidence <> '' then k.evidence
                                       else v_said || coalesce(p_o_evidence[i], '') end
                 where k.record_id = r.id and k.generation = p_generation and k.name = p_o_name[i];
            else
                update runguard.call k set state = v_state, outcome_at = v_now, failure_class = p_o_class[i],
                       effect = case when v_state = 'in_doubt' then 'unknown' else p_o_effect[i] end,
                       first_unknown_at = case when v_state = 'in_doubt' then coalesce(k.first_unknown_at, v_now) end,
                       no_later_than = case when v_state = 'in_doubt'      -- while its holder lived it could be sent
                                            then greatest(k.no_later_than, r.no_later_than) else k.no_later_than end,
                       same_again = (v_state = 'in_doubt' and k.state = 'started' and k.first_unknown_at is not null
                                     and k.error = p_o_error[i]) or (k.state = 'in_doubt' and k.same_again),
                       final = coalesce(p_o_final[i], false) and v_state = 'failed', claims = 0,
                       resume_at = case when v_state = 'paused' then v_now + make_interval(secs => coalesce(p_o_resume_after[i], 0)) end,
                       error = coalesce(p_o_error[i], ''), evidence = v_said || coalesce(p_o_evidence[i], ''),
                       result = case when r.store_result = 'all' then p_o_result[i] end,
                       result_digest = case when r.store_result <> 'none' then sha256(p_o_result[i]) end,
                       result_missing = p_o_missing[i]
                 where k.record_id = r.id and k.generation = p_generation and k.name = p_o_name[i];
            end if;
            closed := closed + 1;
            booked := true;
            v_progress := v_progress or v_state = 'done';
            if r.gate is not null and (v_state = 'paused' or (p_o_name[i] = 'body' and p_o_class[i] = 'quota'
                                                              and p_o_resume_after[i] is not null)) then
                perform runguard.close_gate(r.deployment, r.gate, v_now + make_interval(secs => coalesce(p_o_resume_after[i], 0)),
                                            p_rate, coalesce(c.gate_epoch, 0), p_actor, coalesce(p_o_error[i], ''));
            end if;
            if p_to is null or p_o_name[i] <> 'body' then
                v_event := runguard.book(r, 'answered', p_actor, coalesce(p_o_error[i], ''), json_build_object(
                    'call', p_o_name[i], 'state', v_state, 'evidence', v_said || coalesce(p_o_evidence[i], ''))::text, p_nonce);
            end if;
        else
            r := runguard.keep_late_outcome(r, p_generation, p_fence, p_actor, p_o_name[i], p_o_state[i],
                     case when p_o_state[i] = 'done' then 'applied' else p_o_effect[i] end, p_o_error[i], p_o_result[i]);
        end if;
    end loop;

    for i in 1 .. coalesce(array_length(p_i_name, 1), 0) loop
        c := null;
        v_said := 'lost';
        if live and clock_timestamp() < r.hold_until and (select runguard.lost_time(m) = '' from runguard.meta m) then
            v_said := 'in_doubt';
            c := null;
            v_frozen := runguard.frozen(r.deployment, r.dag_id, r.namespace, r.key);
            v_until := runguard.gate_until(r.deployment, r.gate, true);
            if v_frozen is not null then
                v_said := 'frozen';
                c.error := v_frozen;
            elsif v_until is not null then
                v_said := 'gated';
                c.resume_at := v_until;
                c.error := runguard.why_closed(r.deployment, r.gate);
            elsif r.late_applied = 0 then
                select * into s from runguard.start_call(r, p_i_name[i], p_i_intent[i], p_max_call_time, p_key_lifetime);
                v_said := s.verdict;
                c := s.c;
            end if;
            if v_said in ('run', 'attach') then
                opened := opened + 1;
                v_event := runguard.book(r, 'called', p_actor, '',
                                         json_build_object('call', p_i_name[i], 'attempt', c.attempt)::text, p_nonce);
            elsif v_said = 'open' and c.fence = p_fence then
                v_said := case when c.submitted then 'attach' else 'run' end;       -- my own intent, whose answer was lost
            end if;
        end if;
        return query select 'intent', p_i_name[i], v_said, c.state, c.attempt, v_now,
            case when v_said in ('paused', 'gated') then c.resume_at else c.no_later_than end, c.result, c.result_missing, c.error, null::bigint;
    end loop;

    if live and p_hand_over is not null and p_resume_after is not null then
        v_slot := r.resume_at;                  -- its answer was lost
        if v_slot is null then
            update runguard.call k set resume_at = v_now + make_interval(secs => p_resume_after)
             where k.record_id = r.id and k.generation = r.generation and k.name = 'body' returning * into c;
            if r.gate is not null then
                perform runguard.close_gate(r.deployment, r.gate, c.resume_at, p_rate, coalesce(c.gate_epoch, 0), p_actor,
                                            coalesce(p_error, ''));
            end if;
            v_slot := greatest(c.resume_at, runguard.reserve(r.deployment, r.gate, p_rate));
            if runguard.pauses_are_spent(r, v_slot, p_max_pauses, p_max_pause) then
                perform runguard.move_to_doubt(r, p_actor, runguard.pauses_spent_says(r, v_slot, p_max_pauses) || coalesce(p_error, ''));
                return query select 'record', '', 'ok', 'in_doubt', null::integer, v_now, null::timestamptz, null::bytea, null::text, null::text, null::bigint;
                return;
            end if;
        end if;
    elsif live and p_hand_over is not null and p_error is null then
        update runguard.call k set resume_at = null
         where k.record_id = r.id and k.generation = r.generation and k.name = 'body' and k.resume_at is not null;
        v_passed := found;
    end if;

    target := r.state;
    if mine and (p_to is not null or not live) then
        select coalesce(bool_or(k.state in ('started', 'in_doubt')), false) into doubtful from runguard.call k
         where k.record_id = r.id and k.generation = r.generation;
        target := case when doubtful and not (live and r.calls = 'batch'
                                              and (p_to = 'paused' or (p_to = 'done' and p_completeness = 'partial')))
                       then 'in_doubt'              -- the doubt of a batch is its items', and the others may wait or end
                       when r.late_applied > 0 and p_to is distinct from 'done' then 'in_doubt'
                       when p_to = 'done' and not live and r.calls = 'batch'
                       then 'pending'               -- taken from it by a person; what it counted may have changed since
                       when p_to is null and booked then 'pending'      -- in doubt, and its last caller has just settled it
                       when p_to is null then r.state
                       else p_to end;
    end if;

    if target <> r.state or (mine and p_to is not null and (booked or not (r.state = 'in_doubt' and target = 'in_doubt'))) then
        if target = 'paused' then
            v_until := greatest(v_now + make_interval(secs => coalesce(p_resume_after, 0)),
                                runguard.reserve(r.deployment, r.gate, p_rate));
            v_spent := runguard.pauses_are_spent(r, v_until, p_max_pauses, p_max_pause);
            target := case when v_spent then 'failed' else target end;
        end if;
        if target = 'in_doubt' and r.calls = 'batch' then
            perform runguard.doubt_open_items(r, p_error);
        end if;
        v_what := case target when 'pending' then 'released' else target end;
        update runguard.record k set state = target, lease_until = null, hold_until = null, handed_over = false,
               open_calls = case when target = 'in_doubt' then k.open_calls - closed + opened else 0 end,
               no_later_than = case when target = 'in_doubt' then k.no_later_than end,
               claims = 0, pauses = case target when 'paused' then k.pauses + 1 when 'in_doubt' then k.pauses
                                                when 'pending' then k.pauses else 0 end,
               paused_since = case target when 'paused' then coalesce(k.paused_since, v_now) when 'in_doubt' then k.paused_since
                                          when 'pending' then k.paused_since end,
               failure_class = case target when 'done' then null when 'pending' then null
                                           when 'in_doubt' then coalesce(p_class, 'unknown') else p_class end,
               effect = case target when 'done' then 'applied' when 'pending' then null
                                    when 'in_doubt' then 'unknown' else p_effect end,
               first_unknown_at = case when target = 'in_doubt' then coalesce(k.first_unknown_at, v_now) end,
               needs_person = case target when 'failed' then coalesce(p_needs_person, false) or v_spent
                                          when 'in_doubt' then k.on_doubt = 'ask' else false end,
               resume_at = case when target = 'paused' then v_until end,
               completeness = case when target = 'done' then coalesce(p_completeness, 'full') else 'none' end,
               finished_at = case when target = 'done' then v_now end,
               result = case when target = 'done' and k.store_result = 'all' then p_result end,
               result_digest = case when target = 'done' and k.store_result <> 'none' then sha256(p_result) end,
               result_missing = case when target = 'done' then p_missing end,
               error = case when v_spent then runguard.pauses_spent_says(k, v_until, p_max_pauses) else '' end || coalesce(p_error, ''),
               evidence = coalesce(p_evidence, '')
         where k.id = r.id returning * into r;
        v_event := runguard.book(r, v_what, p_actor, r.error,
                                 json_build_object('evidence', coalesce(p_evidence, ''))::text, p_nonce);
        v_said := 'ok';
    elsif live then
        update runguard.record k set open_calls = k.open_calls - closed + opened,
               claims = case when booked or (opened > 0 and k.calls = 'batch') then 0 else k.claims end,  -- items count their own
               -- From now, and not from before it waited for its gate's row: nobody may take it for dead.
               lease_until = case when p_hand_over is null then least(clock_timestamp() + p_lease, k.hold_until)
                                  else coalesce(v_slot, clock_timestamp()) + p_hand_over end,
               handed_over = p_hand_over is not null, resume_at = v_slot,
               no_later_than = case when k.open_calls - closed + opened > 0     -- it lives, so it may still send
                                    then greatest(k.no_later_than, clock_timestamp() + p_max_call_time)
                                    else k.no_later_than end,
               first_intent_at = case when opened > 0 then coalesce(k.first_intent_at, v_now) else k.first_intent_at end,
               pauses = case when v_progress or v_passed then 0 when v_slot is not null and k.resume_at is null then k.pauses + 1
                             else k.pauses end,
               paused_since = case when v_progress or v_passed then null when v_slot is not null then coalesce(k.paused_since, v_now)
                                   else k.paused_since end,
               first_unknown_at = case when not booked or k.late_applied > 0 or k.calls = 'batch' then k.first_unknown_at else
                   (select min(x.first_unknown_at) from runguard.call x
                     where x.record_id = k.id and x.generation = k.generation and x.state in ('started', 'in_doubt')) end
         where k.id = r.id returning * into r;
        if p_hand_over is not null then
            perform runguard.book(r, 'handed_over', p_actor, coalesce(p_error, ''));
        end if;
        v_said := 'ok';
    elsif mine then
        update runguard.record k set open_calls = k.open_calls - closed where k.id = r.id returning * into r;
        v_said := 'ok';
    else
        if item and booked then
            r := runguard.settle_batch_doubt(r, p_actor);
        end if;
        v_said := case when runguard.broken(r) <> '' then 'broken'
                       when p_to is not null and r.state = p_to and r.fence = p_fence and r.generation = p_generation then 'ok'
                       else 'lost' end;
    end if;
    return query select 'record', '', v_said, r.state, null::integer, v_now, coalesce(r.resume_at, r.lease_until), null::bytea, null::text, r.error, v_event;
end $$;

-- Settles what died without waiting for the next claim: an open or doubtful call -> in_doubt, nothing called -> pending.
create or replace function runguard.sweep(p_actor text, p_limit integer)
returns table (record_id bigint, namespace text, key text, state text) language plpgsql as $$
declare
    r runguard.record;
begin
    perform runguard.pin();
    for r in select k.* from runguard.record k
              where k.state = 'running' and k.lease_until <= clock_timestamp()
                and runguard.believed_until(k) <= clock_timestamp() and runguard.broken(k) = ''
              order by k.id limit p_limit for update skip locked loop
        perform runguard.open_for_writing();
        if r.open_calls > 0 or r.first_unknown_at is not null then
            perform runguard.move_to_doubt(r, p_actor, runguard.silent_holder(r));
        else
            update runguard.record k set state = 'pending', lease_until = null, hold_until = null, handed_over = false,
                   error = 'its holder died before it called anything'
             where k.id = r.id returning * into r;
            perform runguard.book(r, 'released', p_actor, r.error);
        end if;
        return query select k.id, k.namespace::text, k.key::text, k.state::text from runguard.record k where k.id = r.id;
    end loop;
    if has_table_privilege('runguard.listed', 'delete') then     -- only the last one is asked for; a sweep must not fail for it
        delete from runguard.listed l using runguard.listed newer where newer.record_id = l.record_id and newer.fence > l.fence;
    end if;
    perform runguard.fold();
end $$;
