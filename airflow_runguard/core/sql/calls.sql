-- A record's calls: what became of one, whether it may be sent again, and its start; and what becomes of the record whose
-- calls nobody answers for. Claims and writes decide with these, on the record's row that they have locked.

-- Whether a doubtful call may be sent again under its own vendor key (on_doubt = 'replay', else p_key_lifetime is
-- null): while the vendor still remembers the key when it arrives (p_key_lifetime is shorter than the vendor's memory by
-- the time that it may be under way), and not after the same answer has come back.
create or replace function runguard.may_resend(c runguard.call, p_key_lifetime interval) returns boolean
language sql volatile as $$
    select p_key_lifetime is not null and clock_timestamp() < c.first_intent_at + p_key_lifetime and not c.same_again
           and not c.final                      -- else it would go out under its next key
           and not c.earlier_key                -- else under another than the one that was applied
$$;

-- Whether a call had its effect, or may have: it is done, under way, unknown, or a job that goes on at the vendor.
create or replace function runguard.may_have_happened(c runguard.call) returns boolean language sql immutable as $$
    select c.state in ('started', 'done', 'in_doubt') or c.effect is not distinct from 'applied' or (c.submitted and not c.final)
$$;

create or replace function runguard.holder_of(r runguard.record) returns text language sql stable as $$
    select format('%s.%s run %s try %s on %s:%s, since %s', r.dag_id, r.task_id, r.run_id, r.try_number, r.host, r.pid,
                  to_char(r.claimed_at at time zone 'UTC', 'YYYY-MM-DD HH24:MI:SS "UTC"'))
$$;
create or replace function runguard.silent_holder(r runguard.record) returns text language sql stable as $$
    select format('its holder stopped renewing the lease with %s call(s) open (%s)', r.open_calls, runguard.holder_of(r))
$$;

-- running -> in_doubt: its calls may have happened. The fence is not raised, so that the last caller may still settle
-- its own call; open_calls keeps counting what is open.
create or replace function runguard.move_to_doubt(r runguard.record, p_actor text, p_reason text) returns void
language plpgsql as $$
begin
    update runguard.call c set state = 'in_doubt', effect = 'unknown',
           no_later_than = greatest(c.no_later_than, r.no_later_than),
           error = case when r.calls = 'batch' and c.error = '' then p_reason else c.error end,
           first_unknown_at = coalesce(c.first_unknown_at, clock_timestamp()),
           failure_class = coalesce(c.failure_class, 'unknown')
     where c.record_id = r.id and c.generation = r.generation and c.state = 'started';
    update runguard.record set state = 'in_doubt', effect = 'unknown', failure_class = 'unknown',
           first_unknown_at = coalesce(first_unknown_at, clock_timestamp()),
           needs_person = (on_doubt = 'ask'), lease_until = null, hold_until = null, handed_over = false, resume_at = null,
           error = p_reason
     where id = r.id returning * into r;
    perform runguard.book(r, 'in_doubt', p_actor, p_reason);
end $$;

-- What is in doubt waits at its gate no more: it may not be sent again, so somebody is asked about it.
create or replace function runguard.give_turn_up(r runguard.record, p_actor text) returns runguard.record
language plpgsql as $$
begin
    if r.resume_at is not null then
        update runguard.record k set resume_at = null where k.id = r.id returning * into r;
        perform runguard.book(r, 'turn_given_up', p_actor);
    end if;
    return r;
end $$;

-- Whether an entry takes up the job that this call submitted, and sends nothing.
create or replace function runguard.attachable(c runguard.call) returns boolean language sql immutable as $$
    select c.submitted and not c.final and not c.earlier_key
$$;

-- Starts one call under a held record whose row the caller has locked; books its intent in the call's own line.
-- Says 'run'; 'attach' (it was submitted: take up the job of that external_id, and send nothing); or why neither:
-- 'replay' (it is done), 'in_doubt', 'paused', 'open' (already under way under this fence), 'failed',
-- 'broken' (its line has a word or a result that cannot be what was booked).
create or replace function runguard.start_call(
    r runguard.record, p_name text, p_intent text, p_max_call_time interval, p_key_lifetime interval,
    out verdict text, out c runguard.call
) language plpgsql as $$
declare
    v_now timestamptz := clock_timestamp();
begin
    select * into c from runguard.call k where k.record_id = r.id and k.generation = r.generation and k.name = p_name;
    if c.record_id is null then
        insert into runguard.call (record_id, generation, name, state, fence, intent, intent_at, no_later_than, first_intent_at,
            claims, gate_epoch)
        values (r.id, r.generation, p_name, 'started', r.fence, p_intent, v_now, v_now + p_max_call_time, v_now,
            1, runguard.gate_epoch(r.deployment, r.gate))
        returning * into c;
        verdict := 'run';
        return;
    end if;
    verdict := case
        -- An entry calls an item once, though its list may name it twice: what it heard of it stands until the next one.
        when r.calls = 'batch' and c.fence = r.fence and c.outcome_at is not null and c.state in ('failed', 'in_doubt', 'pending')
        then c.state
        when runguard.attachable(c) and (c.state in ('in_doubt', 'pending') or (c.state = 'failed' and c.effect = 'not_applied')
             or (c.state = 'paused' and c.resume_at <= v_now)) then 'attach'
        else case c.state
        when 'done' then case when c.result is null or sha256(c.result) = c.result_digest then 'replay' else 'broken' end
        when 'started' then 'open'
        when 'in_doubt' then case when runguard.may_resend(c, p_key_lifetime) then 'run' else 'in_doubt' end
        when 'paused' then case when c.resume_at <= v_now then 'run' else 'paused' end
        when 'failed' then case when c.effect = 'not_applied' then 'run' else 'failed' end
        when 'pending' then 'run'
        else 'broken' end end;
    if verdict in ('run', 'attach') then
        -- A new vendor key only after a proven final refusal; whatever was unknown goes out under the same key, and was
        -- unknown before this intent, also where the clock was put back since.
        update runguard.call k set state = 'started', fence = r.fence, intent = p_intent,
               intent_at = greatest(v_now, k.first_unknown_at + interval '1 microsecond'),
               no_later_than = v_now + p_max_call_time, outcome_at = null, resume_at = null, final = false,
               first_unknown_at = case when verdict <> 'attach' then k.first_unknown_at end,
               submitted = verdict = 'attach', external_id = case when not k.submitted or verdict = 'attach' then k.external_id end,
               attempt = k.attempt + k.final::int, claims = k.claims + 1,
               gate_epoch = runguard.gate_epoch(r.deployment, r.gate),
               first_intent_at = case when k.final or k.first_intent_at is null then v_now else k.first_intent_at end
         where k.record_id = r.id and k.generation = r.generation and k.name = p_name
        returning * into c;
    end if;
end $$;
