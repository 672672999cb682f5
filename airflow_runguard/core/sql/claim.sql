-- Entering a record (P1, P2, P5, P8, P11): one function call, one transaction, every decision on one row.

-- The claim. A key that is new is entered by one statement, which finds nothing to do in any other case. Refusals and
-- replays come from the plain look at the row: they write and lock nothing. A grant is decided again on the newest row
-- under its lock. 'again' never leaves this function: a lost race is looked at anew.
create or replace function runguard.claim(
    p_deployment text, p_namespace text, p_key text,
    p_payload_version smallint, p_payload_digest text, p_payload_fields text, p_payload_readable text,
    p_calls text, p_store_result text, p_on_doubt text,
    p_nonce text, p_ti_id text, p_dag_id text, p_task_id text, p_run_id text, p_try_number integer, p_map_index integer,
    p_host text, p_pid integer, p_actor text, p_run_at timestamptz,
    p_lease interval, p_max_hold interval, p_max_claims integer, p_max_call_time interval, p_key_lifetime interval,
    p_gate text, p_rate double precision, p_max_pauses integer, p_max_pause interval,
    p_partition text, p_amount numeric, p_currency text,
    out verdict text, out reason text, out now timestamptz, out record_id bigint, out generation integer,
    out fence bigint, out attempt integer, out until timestamptz, out holder text, out store_result text,
    out result bytea, out result_missing text, out payload_fields text, out reentered boolean
) language plpgsql as $$
#variable_conflict use_column
declare
    m        runguard.meta;
    r        runguard.record;
    t        runguard.record;                   -- what a former name leads to
    c        runguard.call;
    s        record;
    locked   boolean := false;
    bound    boolean;
    reenters boolean;
    expired  boolean;
    resend   boolean;
    frozen   text;
    lost     boolean;                           -- the ledger lost time since it was last entered
    late     double precision;                  -- so many seconds too late for its turn; null = in time
    forgets  timestamptz;                       -- when the vendor forgets the first key of what is in doubt
    v_slot   timestamptz;
    v_why    text;
begin
    loop
        if r.id is null then
            with entry as (
                insert into runguard.record as k (deployment, namespace, key, state, fence, claims, open_calls,
                    nonce, ti_id, dag_id, task_id, run_id, try_number, map_index, host, pid,
                    claimed_at, lease_until, hold_until, no_later_than, first_intent_at, calls, on_doubt,
                    payload_version, payload_digest, payload_fields, payload_readable, store_result,
                    gate, partition, amount, currency, digest)
                select p_deployment, p_namespace, p_key, 'running', 1, 1, (p_calls = 'body')::int,
                       p_nonce, p_ti_id, p_dag_id, p_task_id, p_run_id, p_try_number, p_map_index, p_host, p_pid,
                       t.at, t.at + least(p_lease, p_max_hold), t.at + p_max_hold,
                       case when p_calls = 'body' then t.at + p_max_call_time end, case when p_calls = 'body' then t.at end,
                       p_calls, p_on_doubt,
                       p_payload_version, p_payload_digest, p_payload_fields, p_payload_readable, p_store_result,
                       p_gate, p_partition, p_amount, p_currency, ''
                  from runguard.meta m, (select clock_timestamp() as at) t
                 where not exists (select from runguard.record x
                                    where x.deployment = p_deployment and x.namespace = p_namespace and x.key = p_key)
                   and current_setting('transaction_isolation') = 'read committed' and runguard.lost_time(m) = ''
                   and (m.unknown_before is null or p_run_at >= m.unknown_before)
                   and (m.freezes = 0 or runguard.frozen(p_deployment, p_dag_id, p_namespace, p_key) is null)
                   and (p_gate is null or runguard.gate_until(p_deployment, p_gate) is null)
                   and runguard.opened()
                on conflict do nothing returning k.id, k.claimed_at, k.lease_until),
            started as (
                insert into runguard.call (record_id, generation, name, state, fence, intent_at, no_later_than,
                    first_intent_at, claims, gate_epoch)
                select e.id, 1, 'body', 'started', 1, e.claimed_at, e.claimed_at + p_max_call_time, e.claimed_at, 1,
                       case when p_gate is not null then runguard.gate_epoch(p_deployment, p_gate) end
                  from entry e where p_calls = 'body'),
            told as (
                insert into runguard.event (record_id, generation, fence, kind, actor)
                select e.id, 1, 1, 'claimed', p_actor from entry e)
            select 'run', e.claimed_at, e.id, 1, 1, case when p_calls = 'body' then 1 end, e.lease_until, false
              into verdict, now, record_id, generation, fence, attempt, until, reentered from entry e;
            if found then
                return;
            end if;
        end if;
        perform runguard.pin();
        if locked then
            select * into r from runguard.record k
             where k.deployment = p_deployment and k.namespace = p_namespace and k.key = p_key for update;
        else
            select * into r from runguard.record k
             where k.deployment = p_deployment and k.namespace = p_namespace and k.key = p_key;
        end if;
        select * into strict m from runguard.meta;      -- after the wait for the lock, in which time may have been lost
        reason := runguard.lost_time(m);
        now := clock_timestamp();
        if reason <> '' then
            verdict := 'lost_time';
            return;
        end if;
        frozen := case when m.freezes > 0 then runguard.frozen(p_deployment, p_dag_id, p_namespace, p_key) end;
        lost := coalesce(case when r.known_since = 'epoch' then coalesce(p_run_at, '-infinity')   -- only observed: as good as absent
                              else r.known_since end < m.unknown_before, false);

        if r.id is null and coalesce(p_run_at, '-infinity') < m.unknown_before then
            -- Absent, but the ledger lost the time in which it may have been done.
            perform runguard.open_for_writing();
            insert into runguard.record (deployment, namespace, key, state, effect, failure_class, first_unknown_at,
                needs_person, calls, on_doubt, payload_version, payload_digest, payload_fields, payload_readable,
                store_result, dag_id, task_id, run_id, error, digest)
            values (p_deployment, p_namespace, p_key, 'in_doubt', 'unknown', 'unknown', clock_timestamp(),
                true, p_calls, p_on_doubt, p_payload_version, p_payload_digest, p_payload_fields, p_payload_readable,
                p_store_result, p_dag_id, p_task_id, p_run_id,
                'the ledger lost the time in which this may have been done', '')
            on conflict do nothing returning * into r;
            if found then
                perform runguard.book(r, 'in_doubt', p_actor, r.error);
            end if;
            continue;
        elsif r.id is null then
            if frozen is not null or runguard.gate_until(p_deployment, p_gate) is not null then
                -- It may not begin now, but its line does, so that it waits in the open.
                perform runguard.open_for_writing();
                insert into runguard.record (deployment, namespace, key, state, calls, on_doubt, payload_version,
                    payload_digest, payload_fields, payload_readable, store_result, ti_id, dag_id, task_id, run_id,
                    try_number, map_index, gate, partition, amount, currency, digest)
                values (p_deployment, p_namespace, p_key, 'pending', p_calls, p_on_doubt, p_payload_version,
                    p_payload_digest, p_payload_fields, p_payload_readable, p_store_result, p_ti_id, p_dag_id, p_task_id,
                    p_run_id, p_try_number, p_map_index, p_gate, p_partition, p_amount, p_currency, '')
                on conflict do nothing returning * into r;
            end if;
            continue;
        end if;

        reason := runguard.broken(r);
        if reason <> '' then
            verdict := 'broken';
            exit;
        end if;

        bound := r.first_intent_at is not null and not r.payload_accepted
                 and (r.payload_version <> p_payload_version or r.payload_digest <> p_payload_digest);
        if r.renamed_to is not null then        -- whatever was sent under this name is that record's, as it is now
            select * into t from runguard.record k where k.id = r.renamed_to and k.renamed_to is null;
            if t.state = 'done' and t.completeness = 'full' and t.calls <> 'batch' and runguard.broken(t) = ''
               and t.payload_version = p_payload_version and t.payload_digest = p_payload_digest then
                verdict := 'replay';
                store_result := t.store_result;
                result := t.result;
                result_missing := t.result_missing;
                exit;
            end if;
            verdict := 'refused';
            reason := 'renamed';
            holder := array_to_string(runguard.present_name(r), '/');
            exit;
        elsif bound then
            verdict := 'refused';
            reason := 'payload';
            payload_fields := r.payload_fields;
            exit;
        end if;

        reenters := false;
        expired := false;
        v_slot := null;
        late := null;
        resend := false;
        verdict := null;
        if r.state = 'done' and r.payload_accepted and r.payload_digest <> p_payload_digest and locked then
            update runguard.record k set payload_version = p_payload_version, payload_digest = p_payload_digest,
                   payload_fields = p_payload_fields, payload_readable = p_payload_readable, payload_accepted = false
             where k.id = r.id returning * into r;
            perform runguard.book(r, 'payload_changed', p_actor, 'accepted by a person');
            continue;
        elsif r.state = 'done' and p_calls = 'batch' and r.calls = 'batch' then
            null;                               -- its list may have grown: what is done stays done
        elsif r.state = 'done' and not (r.payload_accepted and r.payload_digest <> p_payload_digest) then
            verdict := 'replay';
            store_result := r.store_result;
            result := r.result;
            result_missing := r.result_missing;
        elsif r.state = 'failed' and r.effect <> 'not_applied' and not (p_calls = 'batch' and r.calls = 'batch') then
            verdict := 'refused';
            reason := 'failed';
        elsif r.state = 'paused' and r.resume_at > now then
            verdict := 'paused';
            until := r.resume_at;
        elsif r.state = 'in_doubt' then
            select bool_and(runguard.attachable(k) or runguard.may_resend(k, p_key_lifetime)),
                   min(k.first_intent_at + p_key_lifetime) filter (where not runguard.attachable(k)) into resend, forgets
              from runguard.call k
             where k.record_id = r.id and k.generation = r.generation and k.state = 'in_doubt';
            resend := coalesce(resend, false) and not lost and coalesce(r.resume_at < forgets, true);
            if not resend and (lost or not (p_calls = 'batch' and runguard.doubt_is_its_items(r))) then
                if r.resume_at is not null and not locked then
                    locked := true;             -- there is something to write after all
                    perform runguard.open_for_writing();
                    continue;
                end if;
                r := runguard.give_turn_up(r, p_actor);
                verdict := 'in_doubt';
                reason := r.error;
                until := case when r.no_later_than > now then r.no_later_than end;
            elsif r.resume_at > now then        -- it has a slot at its gate already
                verdict := 'paused';
                until := r.resume_at;
            end if;
        elsif r.state = 'running' then
            if r.nonce = p_nonce then
                verdict := 'run';               -- my own claim, whose answer was lost: nothing is written twice
                select * into c from runguard.call k
                 where k.record_id = r.id and k.generation = r.generation and k.name = 'body';
                reenters := exists (select from runguard.event e
                                     where e.record_id = r.id and e.fence = r.fence and e.kind = 'reentered');
                exit;
            end if;
            reenters := r.handed_over and r.ti_id = p_ti_id and p_ti_id <> '';
            expired := r.lease_until <= now and runguard.believed_until(r) <= now;
            if reenters and r.resume_at > now then      -- it keeps its place, and was told when
                verdict := 'paused';
                until := r.resume_at;
            elsif reenters and r.resume_at is not null and (frozen is not null or runguard.gate_until(p_deployment, p_gate, true) is not null) then
                if r.gate is distinct from p_gate then      -- since a deploy: that is where it waits, and what holds it
                    if not locked then
                        locked := true;
                        perform runguard.open_for_writing();
                        continue;
                    end if;
                    update runguard.record k set gate = p_gate where k.id = r.id returning * into r;
                end if;
                until := runguard.gate_until(p_deployment, p_gate, true);   -- it comes to send: stopped like what begins
                verdict := case when frozen is null then 'paused' else 'frozen' end;
                reason := frozen;
            elsif reenters and r.resume_at is not null and runguard.late_for_turn(r) is not null then
                if not locked then              -- a freeze is over, say: they must not all go on at once
                    locked := true;
                    perform runguard.open_for_writing();
                    continue;
                end if;
                late := runguard.late_for_turn(r);
                v_slot := runguard.turn(p_deployment, p_gate, p_rate, true, true);
                if v_slot is not null then
                    update runguard.record k set resume_at = v_slot, gate = p_gate, lease_until = v_slot + interval '10 minutes'
                     where k.id = r.id returning * into r;
                    perform runguard.book(r, 'turn_missed', p_actor, format('it came %s s after its turn at gate %s', round(late),
                                          p_gate), json_build_object('late', late)::text);
                    verdict := 'paused';
                    until := v_slot;
                end if;
            elsif not reenters and not expired then
                verdict := 'busy';
                until := coalesce(nullif(runguard.believed_until(r), 'infinity'), now + interval '10 minutes');   -- frozen: no sooner
                holder := runguard.holder_of(r);
            end if;
        end if;
        if verdict is null and frozen is not null and not reenters then
            verdict := 'frozen';
            reason := frozen;
        end if;
        exit when verdict is not null;
        if not locked then
            locked := true;                     -- it looks claimable: decide again on the newest row
            perform runguard.open_for_writing();
            continue;
        end if;

        if lost and r.state <> 'in_doubt' then
            -- Last entered before the ledger lost time: it (of a batch that is done: more of its list) may have been done
            -- since. Only a person's word about the whole record ends that.
            update runguard.record k set state = 'in_doubt', effect = 'unknown', failure_class = 'unknown', needs_person = true,
                   completeness = 'none', finished_at = null,
                   first_unknown_at = coalesce(k.first_unknown_at, now), lease_until = null, hold_until = null,
                   late_applied = case when k.calls = 'batch' then greatest(k.late_applied, 1) else k.late_applied end,
                   handed_over = false, resume_at = null, error = 'the ledger lost the time in which this may have been done'
             where k.id = r.id returning * into r;
            perform runguard.book(r, 'in_doubt', p_actor, r.error);
            continue;
        end if;

        if expired and not reenters and (r.open_calls > 0 or r.first_unknown_at is not null) then
            perform runguard.move_to_doubt(r, p_actor, runguard.silent_holder(r));
            continue;
        elsif (p_calls <> 'batch' or r.calls <> 'batch')
              and exists (select from runguard.call k where k.record_id = r.id and k.generation = r.generation
                  and (p_calls = 'batch' or r.calls = 'batch' or (k.name = 'body') <> (p_calls = 'body'))
                  and runguard.may_have_happened(k)) then
            verdict := 'refused';               -- cut into other calls than before: it would repeat what they have done
            reason := 'calls';
            exit;
        elsif not reenters and r.state <> 'done' then
            if p_calls = 'body' then            -- however it came to be looked at: the vendor said when
                select k.resume_at, k.error into v_slot, v_why from runguard.call k
                 where k.record_id = r.id and k.generation = r.generation and k.name = 'body' and k.state = 'paused'
                   and k.resume_at > now;
            end if;
            if v_slot is null then
                late := case when runguard.gate_until(p_deployment, p_gate, true) is null then runguard.late_for_turn(r) end;
                v_slot := runguard.turn(p_deployment, p_gate, p_rate, r.resume_at is not null, late is not null);
                v_why := case when late is null then runguard.why_closed(p_deployment, p_gate)
                              else format('it came %s s after its turn at gate %s', round(late), p_gate) end;
                now := clock_timestamp();       -- it may have had to wait for its gate's row
            end if;
        end if;
        if v_slot is not null then              -- told to wait, its gate is closed, or others are waiting before it
            if r.state = 'in_doubt' and p_calls <> 'batch' and v_slot >= forgets then    -- by then it may not be sent
                r := runguard.give_turn_up(r, p_actor);
                verdict := 'in_doubt';
                reason := r.error;
                exit;
            elsif r.state = 'in_doubt' then     -- what is unknown stays where it is, but it keeps its slot
                update runguard.record k set resume_at = v_slot, gate = p_gate where k.id = r.id returning * into r;
                perform runguard.book(r, case when late is null then 'waits' else 'turn_missed' end, p_actor, v_why,
                                      json_strip_nulls(json_build_object('late', late))::text);
                verdict := 'paused';
            elsif late is null and runguard.pauses_are_spent(r, v_slot, p_max_pauses, p_max_pause) then
                r := runguard.spend(r, v_slot, p_max_pauses, p_actor, v_why);
                verdict := 'refused';
                reason := 'pauses';
            else
                update runguard.record k set state = 'paused', resume_at = v_slot, failure_class = 'quota',
                       lease_until = null, hold_until = null, handed_over = false, effect = 'not_applied', needs_person = false, paused_since = coalesce(k.paused_since, now),
                       ti_id = p_ti_id, dag_id = p_dag_id, task_id = p_task_id, run_id = p_run_id, try_number = p_try_number,
                       map_index = p_map_index, gate = p_gate, error = v_why
                 where k.id = r.id returning * into r;
                perform runguard.book(r, case when late is null then 'paused' else 'turn_missed' end, p_actor, v_why,
                                      json_strip_nulls(json_build_object('late', late))::text);
                verdict := 'paused';
            end if;
            until := v_slot;
            exit;
        elsif not reenters and r.claims >= p_max_claims then
            if r.state = 'in_doubt' then
                r := runguard.give_turn_up(r, p_actor);
                verdict := 'in_doubt';
                reason := format('claimed %s times without an outcome', r.claims);
                exit;
            end if;
            if r.state <> 'running' then        -- only a running record may fail; enter it to say so
                update runguard.record k set state = 'running', fence = k.fence + 1, nonce = p_nonce, lease_until = now
                 where k.id = r.id;
            end if;
            update runguard.record k set state = 'failed', failure_class = 'processing', effect = 'not_applied',
                   needs_person = true, lease_until = null, hold_until = null, handed_over = false, claims = 0,
                   error = format('claimed %s times without any outcome: something kills its worker', r.claims)
             where k.id = r.id returning * into r;
            perform runguard.book(r, 'poison', p_actor, r.error);
            verdict := 'refused';
            reason := 'poison';
            exit;
        end if;

        if r.payload_digest <> p_payload_digest or r.payload_version <> p_payload_version then
            perform runguard.book(r, 'payload_changed', p_actor, '',
                                  json_build_object('from', r.payload_digest, 'to', p_payload_digest)::text);
        end if;
        if resend and p_calls <> 'batch' then
            -- What was submitted is attached to. The other open calls of a dead holder go out again under their own keys;
            -- what is unknown stays unknown.
            if exists (select from runguard.call k where k.record_id = r.id and k.generation = r.generation
                          and k.state = 'in_doubt' and not runguard.attachable(k)) then
                perform runguard.book(r, 'resend', p_actor, 'repeating was declared safe (on_doubt = replay)');
            else
                perform runguard.book(r, 'attaches', p_actor);
            end if;
        end if;
        update runguard.record k set state = 'running', fence = k.fence + 1,
               claims = case when reenters then k.claims else k.claims + 1 end,
               nonce = p_nonce, ti_id = p_ti_id, dag_id = p_dag_id, task_id = p_task_id, run_id = p_run_id,
               try_number = p_try_number, map_index = p_map_index, host = p_host, pid = p_pid, handed_over = false,
               claimed_at = now, lease_until = now + least(p_lease, p_max_hold), hold_until = now + p_max_hold,
               known_since = now, resume_at = null, failure_class = null, effect = null, needs_person = false, error = '', evidence = '',
               completeness = 'none', finished_at = null, result = null, result_digest = null, result_missing = null,
               calls = p_calls, on_doubt = p_on_doubt, store_result = p_store_result,
               payload_version = p_payload_version, payload_digest = p_payload_digest,
               payload_fields = p_payload_fields, payload_readable = p_payload_readable, payload_accepted = false,
               gate = p_gate, partition = p_partition, amount = p_amount, currency = p_currency,
               open_calls = case when reenters then k.open_calls when p_calls = 'body' then 1 else 0 end,
               no_later_than = case when p_calls = 'body' then greatest(k.no_later_than, now + p_max_call_time)
                                    else k.no_later_than end,
               first_intent_at = case when p_calls = 'body' then coalesce(k.first_intent_at, now)
                                      else k.first_intent_at end
         where k.id = r.id returning * into r;
        if p_calls = 'body' and reenters then
            -- The body goes on where it waited: its call stays open, under the new fence (and whether it was told to wait).
            update runguard.call k set fence = r.fence, no_later_than = now + p_max_call_time,
                   gate_epoch = runguard.gate_epoch(p_deployment, p_gate)
             where k.record_id = r.id and k.generation = r.generation and k.name = 'body' returning * into c;
        elsif p_calls = 'body' then
            select * into s from runguard.start_call(r, 'body', null, p_max_call_time, p_key_lifetime);
            c := s.c;
            if s.verdict not in ('run', 'attach') then  -- its own line contradicts the record's: nobody knows
                perform runguard.move_to_doubt(r, p_actor, format('it looked free, but its body is %s', s.verdict));
                continue;
            end if;
        end if;
        perform runguard.book(r, case when reenters then 'reentered' when expired then 'taken_over' else 'claimed' end, p_actor);
        verdict := 'run';
        exit;
    end loop;
    record_id := r.id;
    generation := r.generation;
    fence := r.fence;
    attempt := c.attempt;
    if verdict = 'run' then
        until := r.lease_until;
        reentered := reenters and c.record_id is not null;              -- its body was begun before this entry
    end if;
end $$;
