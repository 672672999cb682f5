-- What people (and reconcilers) may change (P13): each books who, when and why in the same transaction. Every function
-- answers one word; anything but 'ok' changed nothing.

-- It is known to have happened, but nobody knows what came back: a person may still say that.
create or replace function runguard.lacks_result(c runguard.call) returns boolean language sql immutable as $$
    select c.state = 'done' and c.result is null and c.result_missing is not null
$$;

-- p_call = null: the whole record happened, or did not. Otherwise only that call; once no other call is in doubt the
-- record goes to pending, and the next run goes on after it. p_known_by: who says it knew of no doubt that is younger.
create or replace function runguard.resolve(
    p_record_id bigint, p_seen_fence bigint, p_answer text, p_call text, p_result bytea, p_reference text,
    p_actor text, p_reason text, p_force boolean, p_known_by timestamptz
) returns text language plpgsql as $$
declare
    r      runguard.record;
    s      record;
    v_left integer;
begin
    if p_answer not in ('happened', 'did_not_happen', 'failed') then
        raise exception 'an answer is happened, did_not_happen or failed, not %', p_answer;
    end if;
    p_call := nullif(p_call, 'body');           -- a body is the whole record
    select * into s from runguard.look(p_record_id, p_seen_fence);
    r := s.r;
    if r.calls = 'batch' and r.late_applied = 0 then
        return (select i.verdict from runguard.resolve_items(p_record_id, p_seen_fence, p_answer, 'in_doubt', null,
            array[p_call], array[p_result], p_reference, p_actor, p_reason, p_force, null, p_known_by) i);
    end if;
    if s.refused is not null then
        return s.refused;
    elsif r.state = 'done' and r.result is null and r.result_missing is not null
          and p_answer = 'happened' and p_result is not null and p_call is null then
        -- It is known to have happened; only its result was never stored.
        update runguard.record set result = case when store_result = 'all' then p_result end,
               result_digest = sha256(p_result), result_missing = null
         where id = r.id returning * into r;
        perform runguard.book(r, 'resolved', p_actor, p_reason, json_build_object(
            'answer', 'the missing result', 'reference', p_reference)::text);
        return 'ok';
    elsif p_answer = 'happened' and p_result is not null and exists (select from runguard.call c where c.record_id = r.id
              and c.generation = r.generation and c.name = p_call and runguard.lacks_result(c)) then
        update runguard.call c set result = case when r.store_result = 'all' then p_result end,
               result_digest = sha256(p_result), result_missing = null
         where c.record_id = r.id and c.generation = r.generation and c.name = p_call;
        perform runguard.book(r, 'resolved', p_actor, p_reason, json_build_object(
            'answer', 'the missing result', 'call', p_call, 'reference', p_reference)::text);
        return 'ok';
    elsif not (r.state = 'in_doubt' or (r.state = 'failed' and p_answer = 'happened')) then
        return 'not_in_doubt';
    elsif (p_call is null and r.first_unknown_at > p_known_by) or exists (select from runguard.call c where c.record_id = r.id
              and c.generation = r.generation and c.first_unknown_at > p_known_by and (c.name = p_call or p_call is null)) then
        return 'moved';                         -- it came into doubt anew since
    elsif p_answer = 'did_not_happen' and r.no_later_than > clock_timestamp() and not p_force then
        return 'too_early';
    elsif p_call is not null and not exists (select from runguard.call c where c.record_id = r.id
              and c.generation = r.generation and c.name = p_call and c.state in ('started', 'in_doubt', 'failed')) then
        return 'no_such_call';
    end if;

    update runguard.call c set
           state = case p_answer when 'happened' then 'done' when 'failed' then 'failed' else 'pending' end,
           effect = case p_answer when 'happened' then 'applied' when 'failed' then 'unknown' else 'not_applied' end,
           outcome_at = clock_timestamp(), first_unknown_at = null, same_again = false, late_applied = false, earlier_key = false,
           external_id = coalesce(p_reference, c.external_id), submitted = c.submitted and p_answer <> 'did_not_happen',
           result = case when p_answer = 'happened' and p_call is not null and r.store_result = 'all' then p_result end,
           result_digest = case when p_answer = 'happened' and p_call is not null and r.store_result <> 'none' then sha256(p_result) end,
           result_missing = case when p_answer = 'happened' and r.store_result <> 'none' and (p_call is null or p_result is null)
                                 then 'resolved by hand without a result' end
     where c.record_id = r.id and c.generation = r.generation
       and (c.name = p_call or (p_call is null and c.state in ('started', 'in_doubt')));
    select count(*) into v_left from runguard.call c
     where c.record_id = r.id and c.generation = r.generation and c.state in ('started', 'in_doubt');

    if p_call is not null and v_left > 0 then
        update runguard.record set open_calls = (select count(*) from runguard.call c where c.record_id = r.id
               and c.generation = r.generation and c.fence = r.fence and c.state in ('started', 'in_doubt') and c.outcome_at is null)
         where id = r.id returning * into r;
    elsif p_answer = 'happened' and p_call is null then
        update runguard.record set state = 'done', effect = 'applied', failure_class = null, completeness = 'full',
               calls = runguard.calls_by_hand(calls), needs_person = false, open_calls = 0, no_later_than = null, first_unknown_at = null, late_applied = 0,
               claims = 0, known_since = clock_timestamp(), finished_at = clock_timestamp(), result = case when store_result = 'all' then p_result end,
               result_digest = case when store_result <> 'none' then sha256(p_result) end,
               result_missing = case when p_result is null and store_result <> 'none'
                                     then 'resolved by hand without a result' end, error = '', evidence = p_reason
         where id = r.id returning * into r;
    elsif p_answer = 'failed' then
        update runguard.record set state = 'failed', effect = 'unknown', failure_class = coalesce(failure_class, 'unknown'),
               needs_person = false, open_calls = 0, no_later_than = null, first_unknown_at = null, late_applied = 0,
               evidence = p_reason
         where id = r.id returning * into r;
    else
        if r.state = 'failed' then              -- failed -> pending is reopen's; go by way of doubt, which is what it was
            update runguard.record set state = 'in_doubt', effect = 'unknown', needs_person = false,
                   first_unknown_at = clock_timestamp() where id = r.id;
        end if;
        update runguard.record set state = 'pending', effect = null, failure_class = null, needs_person = false,
               open_calls = 0, no_later_than = null, first_unknown_at = null, late_applied = 0, claims = 0,
               known_since = case when p_call is null then clock_timestamp() else known_since end, evidence = p_reason
         where id = r.id returning * into r;
    end if;
    perform runguard.book(r, 'resolved', p_actor, p_reason, json_build_object(
        'answer', p_answer, 'call', p_call, 'reference', p_reference, 'forced', p_force)::text);
    return 'ok';
end $$;

-- Whether some of the work was done already, or may have been, whatever the record as a whole says.
create or replace function runguard.partly_happened(r runguard.record) returns boolean language sql stable as $$
    select exists (select from runguard.call c where c.record_id = r.id and c.generation = r.generation
                      and runguard.may_have_happened(c))
$$;

-- Orders the work anew: a new generation with new vendor keys. Two orders that saw the same generation make one.
create or replace function runguard.reopen(
    p_record_id bigint, p_seen_generation integer, p_seen_fence bigint, p_again_although_applied boolean, p_actor text,
    p_reason text
) returns text language plpgsql as $$
declare
    r   runguard.record;
    s   record;
    old runguard.record;
begin
    select * into s from runguard.look(p_record_id, p_seen_fence);
    r := s.r;
    if s.refused <> 'renamed' then
        return s.refused;
    elsif r.generation <> p_seen_generation then
        return 'moved';
    elsif s.refused = 'renamed' and not p_again_although_applied then
        return 'renamed';
    elsif r.state not in ('done', 'failed') then
        return 'not_finished';
    elsif not p_again_although_applied and (r.effect <> 'not_applied' or runguard.partly_happened(r)) then
        return 'applied';
    end if;
    old := r;
    update runguard.record set state = 'pending', generation = generation + 1, failure_class = null, effect = null,
           completeness = 'none', needs_person = false, claims = 0, pauses = 0, paused_since = null, late_applied = 0, first_intent_at = null,
           first_unknown_at = null, no_later_than = null, resume_at = null, finished_at = null, result = null,
           result_digest = null, result_missing = null, error = '', evidence = '', payload_accepted = false,
           known_since = clock_timestamp(), renamed_to = null
     where id = r.id returning * into r;
    perform runguard.book(r, 'reopened', p_actor, p_reason, json_build_object(
        'although_applied', p_again_although_applied, 'state', old.state, 'finished_at', old.finished_at, 'payload', old.payload_readable, 'error', old.error,
        'result', encode(old.result, 'escape'), 'result_missing', old.result_missing)::text);
    return 'ok';
end $$;

-- Takes a record from its holder. Safe also while that one lives: the next claim raises the fence, and what it has open
-- goes to in_doubt, not to the next holder.
create or replace function runguard.release(p_record_id bigint, p_seen_fence bigint, p_actor text, p_reason text) returns text
language plpgsql as $$
declare
    r runguard.record;
    s record;
begin
    select * into s from runguard.look(p_record_id, p_seen_fence);
    r := s.r;
    if s.refused is not null then
        return s.refused;
    elsif r.state <> 'running' then
        return 'not_running';
    elsif r.open_calls > 0 or r.first_unknown_at is not null then
        perform runguard.move_to_doubt(r, p_actor, 'released with a call open: ' || p_reason);
        return 'ok';
    end if;
    update runguard.record set state = 'pending', lease_until = null, hold_until = null, handed_over = false, claims = 0
     where id = r.id returning * into r;
    perform runguard.book(r, 'released', p_actor, p_reason);
    return 'ok';
end $$;

-- The way out of "broken": a person accepts the line as it stands, or says what state it is to have. p_seen_digest is
-- the digest of the line that the person was shown (what it has now, not what it should have).
create or replace function runguard.repair(
    p_record_id bigint, p_seen text, p_state text, p_actor text, p_reason text
) returns text language plpgsql as $$
declare
    r   runguard.record;
    old runguard.record;
    e   runguard.event;
    v_open integer;
    v_until timestamptz;
begin
    perform runguard.pin();
    perform runguard.open_for_writing();
    select * into r from runguard.record k where k.id = p_record_id for update;
    if p_state not in ('pending', 'done', 'failed', 'in_doubt') then
        raise exception 'a person can say pending, done, failed or in_doubt, not %', p_state using errcode = 'RG002';
    elsif not found then
        return 'missing';
    elsif runguard.broken(r) = '' then
        return 'not_broken';
    elsif encode(sha256(convert_to(r::text, 'UTF8')), 'hex') <> p_seen then
        return 'moved';
    elsif r.renamed_to is not null and p_state <> 'failed' then
        return 'renamed';
    end if;
    old := r;
    select count(*), max(c.no_later_than) into v_open, v_until from runguard.call c where c.record_id = r.id and c.generation = r.generation
       and c.state in ('started', 'in_doubt') and c.outcome_at is null;
    if p_state = 'pending' and greatest(v_until, r.no_later_than, r.lease_until) > clock_timestamp() then
        return 'too_early';
    end if;
    perform set_config('runguard.writing', 'repair', true);
    if p_state is null then
        update runguard.record set row_version = 1, digest_version = 1,
               result_digest = case when result is null then result_digest else sha256(result) end
         where id = r.id returning * into r;
    else
        update runguard.call c set state = 'pending', effect = 'not_applied', outcome_at = clock_timestamp(),
               first_unknown_at = null, resume_at = null, same_again = false, late_applied = false, earlier_key = false
         where p_state = 'pending' and c.record_id = r.id and c.generation = r.generation
           and (c.state <> 'done' or c.name = 'body');
        update runguard.record set row_version = 1, digest_version = 1, state = p_state, lease_until = null, hold_until = null,
               handed_over = false, resume_at = null,
               known_since = case when p_state = 'in_doubt' then known_since else clock_timestamp() end,
               open_calls = case when p_state = 'in_doubt' then v_open else 0 end,
               no_later_than = case when p_state = 'in_doubt' and v_open > 0 then coalesce(greatest(no_later_than, v_until), clock_timestamp())
                                    when p_state = 'in_doubt' then no_later_than end,
               late_applied = (calls = 'batch' and p_state = 'in_doubt')::int,
               calls = case when p_state = 'done' then runguard.calls_by_hand(calls) else calls end,
               first_unknown_at = case when p_state = 'in_doubt' then clock_timestamp() end,
               effect = case p_state when 'done' then 'applied' when 'in_doubt' then 'unknown' when 'failed' then 'unknown' end,
               failure_class = case when p_state in ('in_doubt', 'failed') then 'unknown' end,
               needs_person = p_state in ('in_doubt', 'failed') and renamed_to is null,
               completeness = case when p_state = 'done' then 'full' else 'none' end,
               finished_at = case when p_state = 'done' then clock_timestamp() end,
               result = case when p_state = 'done' then result end,
               result_digest = case when p_state = 'done' then sha256(result) end,
               result_missing = case when p_state = 'done' and result is null then 'repaired by hand without a result' end
         where id = r.id returning * into r;
    end if;
    if runguard.broken(r) <> '' then
        raise exception 'record %: it would still be broken: %', r.id, runguard.broken(r) using errcode = 'RG002';
    end if;
    perform runguard.open_for_writing();
    for e in select k.* from runguard.event k where k.record_id = r.id and k.kind = 'late_outcome' and coalesce(p_state, 'pending') = 'pending'
                and k.detail::json ->> 'effect' = 'applied' and (k.detail::json ->> 'unheeded')::boolean and k.id > coalesce((
                    select max(x.id) from runguard.event x where x.record_id = r.id and x.kind = 'repaired'), 0) order by k.id loop
        r := runguard.heed_late_outcome(r, e.generation, e.fence, e.actor, e.detail::json ->> 'call');
    end loop;
    perform runguard.book(r, 'repaired', p_actor, p_reason, json_build_object('old', to_json(old))::text);
    return 'ok';
end $$;

-- Lets the next claim bring another payload: a done record then answers to the new shape; one that is proven not
-- applied runs with it, under a new vendor key.
create or replace function runguard.accept_payload(p_record_id bigint, p_actor text, p_reason text) returns text
language plpgsql as $$
declare
    r runguard.record;
    s record;
begin
    select * into s from runguard.look(p_record_id, null);
    r := s.r;
    if s.refused is not null then
        return s.refused;
    elsif r.first_unknown_at is not null or r.open_calls > 0 or r.state in ('running', 'in_doubt')
       or (r.state = 'failed' and r.effect <> 'not_applied') then
        return 'unknown_effect';
    elsif r.state <> 'done' and runguard.partly_happened(r) then
        return 'partly_done';
    end if;
    update runguard.call c set final = true where c.record_id = r.id and c.generation = r.generation
       and c.state in ('pending', 'failed', 'paused') and c.effect = 'not_applied';
    update runguard.record set payload_accepted = true where id = r.id returning * into r;
    perform runguard.book(r, 'payload_accepted', p_actor, p_reason);
    return 'ok';
end $$;

-- Books work that was done by hand, outside of any task: the task then gives its result back and calls nothing. Also for
-- a key that no task has claimed yet.
create or replace function runguard.bypass(
    p_deployment text, p_namespace text, p_key text, p_result bytea, p_reference text, p_actor text, p_reason text
) returns text language plpgsql as $$
declare
    r runguard.record;
begin
    perform runguard.pin();
    perform runguard.open_for_writing();
    insert into runguard.record (deployment, namespace, key, state, calls, on_doubt, payload_version, payload_digest,
        payload_fields, payload_readable, store_result, digest)
    values (p_deployment, p_namespace, p_key, 'pending', 'body', 'ask', 0, '', '{}', '{}', 'all', '')
    on conflict do nothing;
    select * into r from runguard.record k
     where k.deployment = p_deployment and k.namespace = p_namespace and k.key = p_key for update;
    if runguard.broken(r) <> '' then
        return 'broken';
    elsif r.renamed_to is not null then
        return 'renamed';
    elsif r.state not in ('pending', 'paused', 'failed') or r.first_unknown_at is not null or runguard.partly_happened(r) then
        return r.state;
    end if;
    update runguard.record set state = 'done', effect = 'applied', failure_class = null, needs_person = false,
           calls = runguard.calls_by_hand(calls), resume_at = null, completeness = 'full', finished_at = clock_timestamp(), result = p_result,
           result_digest = sha256(p_result), error = '', evidence = '', pauses = 0, paused_since = null,
           result_missing = case when p_result is null then 'booked by hand without a result' end
     where id = r.id returning * into r;
    perform runguard.book(r, 'done_by_hand', p_actor, p_reason, json_build_object('reference', p_reference)::text);
    return 'ok';
end $$;

-- One paused record goes on at once, if its gate lets it, and so does one that keeps its place; one whose budget of pauses is
-- spent, when its task is cleared.
create or replace function runguard.resume_now(p_record_id bigint, p_seen_fence bigint, p_actor text, p_reason text)
returns text language plpgsql as $$
declare
    r runguard.record;
    s record;
    v_kept boolean;
begin
    select * into s from runguard.look(p_record_id, p_seen_fence);
    r := s.r;
    if s.refused is not null then
        return s.refused;
    end if;
    v_kept := r.state = 'running' and r.resume_at is not null;
    update runguard.call c set resume_at = clock_timestamp()
     where c.record_id = r.id and c.generation = r.generation
       and (r.state in ('paused', 'failed') and c.state = 'paused' or v_kept and c.name = 'body');
    if not found and r.state <> 'paused' then
        return 'not_paused';
    end if;
    update runguard.record set resume_at = clock_timestamp(),
           lease_until = case when v_kept then clock_timestamp() + interval '10 minutes' end
     where id = r.id returning * into r;
    perform runguard.book(r, 'resumed', p_actor, p_reason);
    return 'ok';
end $$;

-- Gives a record another name (a DAG was renamed). The vendor keys change with the name, so nothing may be under way.
--
-- The old name stays behind as a line that leads to the record, since an older run may still order under it: that is the
-- same order, and the vendor keys of that name are used. All done, it gives the same result back; anything else it refuses, also
-- a batch, whose list may have grown. Its
-- generation is the last one that was sent under it, so that a person who reopens it gets vendor keys that are new.
-- A record that goes back to a former name of its own trades names with the line that stands there.
create or replace function runguard.rename(
    p_record_id bigint, p_namespace text, p_key text, p_actor text, p_reason text
) returns text language plpgsql as $$
declare
    r      runguard.record;
    s      record;
    old    runguard.record;
    former runguard.record;
begin
    select * into s from runguard.look(p_record_id, null);
    r := s.r;
    if s.refused is not null then
        return s.refused;
    elsif r.state in ('running', 'in_doubt', 'paused') or exists (select from runguard.call c where c.record_id = r.id
              and c.generation = r.generation and c.state <> 'done' and runguard.may_have_happened(c)) then
        return 'under_way';
    end if;
    old := r;
    begin
        update runguard.record k set key = E'\x01' || k.id   -- no name of anybody, until the names are traded
         where k.deployment = r.deployment and k.namespace = p_namespace and k.key = p_key and k.renamed_to = r.id
           and runguard.broken(k) = '' returning * into former;
        update runguard.record set namespace = p_namespace, key = p_key where id = r.id returning * into r;
        if former.id is null then
            insert into runguard.record (deployment, namespace, key, state, failure_class, effect, calls, on_doubt,
                payload_version, payload_digest, payload_fields, payload_readable, store_result, renamed_to, digest)
            values (r.deployment, old.namespace, old.key, 'failed', 'planning', 'unknown', 'body', 'ask',
                r.payload_version, r.payload_digest, r.payload_fields, r.payload_readable, r.store_result, r.id, '')
            returning * into former;
        end if;
    exception when unique_violation then
        return 'taken';
    end;
    update runguard.record k set namespace = old.namespace, key = old.key, generation = greatest(k.generation, r.generation),
           state = w.state, effect = w.effect, failure_class = w.failure_class, completeness = w.completeness,
           finished_at = w.finished_at, result = w.result, result_digest = w.result_digest, result_missing = w.result_missing,
           error = format('renamed to %s/%s', r.namespace, r.key), calls = runguard.calls_by_hand(r.calls),
           store_result = r.store_result, first_intent_at = r.first_intent_at, known_since = clock_timestamp(),
           payload_version = r.payload_version, payload_digest = r.payload_digest, payload_fields = r.payload_fields,
           payload_readable = r.payload_readable, dag_id = r.dag_id, task_id = r.task_id
      from (select 'done' as state, 'applied' as effect, null as failure_class, r.completeness, r.finished_at, r.result,
                   r.result_digest, r.result_missing where r.state = 'done' and r.completeness = 'full' and r.calls <> 'batch'
            union all
            select 'failed', 'unknown', 'planning', 'none', null, null, null, null
             where r.state <> 'done' or r.completeness <> 'full' or r.calls = 'batch') w
     where k.id = former.id returning * into former;
    perform runguard.book(former, 'left_behind', p_actor, p_reason,
                          json_build_object('to', json_build_array(r.namespace, r.key))::text);
    update runguard.call c set final = true    -- what goes out from here on has a key of its own
     where c.record_id = r.id and c.generation = r.generation and c.state in ('pending', 'failed', 'paused')
       and c.first_intent_at is not null;
    perform runguard.book(r, 'renamed', p_actor, p_reason,
                          json_build_object('from', json_build_array(old.namespace, old.key))::text);
    return 'ok';
end $$;

-- P14. A witness is an event that somebody outside the ledger remembers, with the epoch it belongs to; if it is not
-- there, the ledger went back in time, and says so from then on.
create or replace function runguard.confront(p_epoch integer, p_event_id bigint, p_mark text) returns boolean
language plpgsql as $$
begin
    if p_epoch < (select m.epoch from runguard.meta m)
       or exists (select from runguard.event e where e.id = p_event_id and e.mark = p_mark) then
        return true;
    end if;
    perform runguard.lose(format('event %s, which was committed before, is no longer in it', p_event_id));
    return false;
end $$;

create or replace function runguard.lose(p_why text) returns void language plpgsql as $$
begin
    perform runguard.pin();
    perform runguard.open_for_writing();
    update runguard.meta set lost = p_why where lost is null;
    if found then
        insert into runguard.event (kind, actor, reason) values ('ledger_lost_time', 'ledger', p_why);
    end if;
end $$;

-- p_lost_since = null: the person says that nothing was lost. Otherwise absent keys of runs older than now are in doubt
-- from now on: they may have been done in the time that is gone.
create or replace function runguard.acknowledge_restore(p_lost_since timestamptz, p_actor text, p_reason text) returns integer
language plpgsql as $$
declare
    v_epoch integer;
begin
    perform runguard.pin();
    perform runguard.open_for_writing();
    update runguard.meta m set system_identifier = w.system_identifier, timeline = w.timeline, database_oid = w.database_oid,
           epoch = m.epoch + 1, lost = null,
           unknown_before = case when p_lost_since is null then m.unknown_before else clock_timestamp() end
      from runguard.whereabouts() w returning m.epoch into v_epoch;
    insert into runguard.event (kind, actor, reason, detail) values ('restore_acknowledged', p_actor, p_reason,
        json_build_object('lost_since', p_lost_since, 'epoch', v_epoch)::text);
    return v_epoch;
end $$;
