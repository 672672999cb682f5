-- What watches over records that nobody holds: who waits and may go on, who is asked, who is to be told.

-- -- those that wait in Airflow --------------------------------------------------------------------------------------

-- Which of these records a waiting task may look at again. One that has a slot (paused, or in doubt and about to be sent
-- again) at that slot, if its gate is open (what is in doubt even so: later its vendor may have forgotten its key, and
-- somebody is to be asked); a busy one when its holder let go or died; anything else at once, also
-- one that is not there any more (a restore took it): the claim decides.
create or replace function runguard.due(p_ids bigint[]) returns setof bigint language sql volatile as $$
    select i.id from unnest(p_ids) i (id) left join runguard.record r on r.id = i.id
     where case when r.resume_at is not null then r.resume_at <= clock_timestamp()
                    and (r.state = 'in_doubt' or runguard.gate_until(r.deployment, r.gate, true) is null)
                when r.state = 'running' then r.lease_until <= clock_timestamp()
                else true end
       and ((select m.freezes from runguard.meta m) = 0
            or runguard.frozen(r.deployment, r.dag_id, r.namespace, r.key) is null)
$$;

create or replace function runguard.watching(p_name text, p_waits integer) returns void language plpgsql as $$
begin
    perform runguard.pin();
    insert into runguard.watcher (name, at, waits) values (p_name, clock_timestamp(), p_waits)
    on conflict (name) do update set at = excluded.at, waits = excluded.waits;
    delete from runguard.watcher w where w.at < clock_timestamp() - interval '1 day';
end $$;

-- -- questions -------------------------------------------------------------------------------------------------------

create or replace function runguard.ask(
    p_record_id bigint, p_generation integer, p_fence bigint, p_ti_id text, p_dag_id text, p_task_id text, p_run_id text, p_map_index integer,
    p_at timestamptz, p_actor text
) returns void language plpgsql as $$
declare
    r runguard.record;
begin
    perform runguard.pin();
    perform runguard.open_for_writing();
    select * into strict r from runguard.record k where k.id = p_record_id;
    insert into runguard.question (ti_id, record_id, generation, fence, dag_id, task_id, run_id, map_index, at)
    values (p_ti_id, p_record_id, p_generation, p_fence, p_dag_id, p_task_id, p_run_id, p_map_index, p_at)
    on conflict (ti_id) do update set closed_at = null, at = p_at, record_id = p_record_id,
           generation = p_generation, fence = p_fence;
    perform runguard.book(r, 'asked', p_actor);
end $$;

-- Nobody answered in time: a person still may, but the task waits no longer.
create or replace function runguard.give_up_asking(p_record_id bigint, p_seen_fence bigint, p_actor text, p_reason text)
returns text language plpgsql as $$
declare
    r runguard.record;
    s record;
begin
    select * into s from runguard.look(p_record_id, p_seen_fence);
    r := s.r;
    if s.refused is not null then
        return s.refused;
    elsif r.state <> 'in_doubt' then
        return 'not_in_doubt';
    end if;
    update runguard.call c set state = 'failed', effect = 'unknown', outcome_at = coalesce(c.outcome_at, clock_timestamp())
     where c.record_id = r.id and c.generation = r.generation and c.state in ('started', 'in_doubt');
    update runguard.record set state = 'failed', effect = 'unknown', failure_class = coalesce(failure_class, 'unknown'),
           needs_person = true, open_calls = 0, error = p_reason
     where id = r.id returning * into r;
    perform runguard.book(r, 'ask_timed_out', p_actor, p_reason);
    return 'ok';
end $$;

-- -- notices ------------------------------------------------------------------------------------------------------------

-- Booked in the transaction of the event that it tells of, so that a killed process tells people too. Each occasion is told
-- once, whoever finds it and however often: a doubt (it lasts until it is settled, also where it is sent again meanwhile),
-- what one entry failed with, what a stale holder reports of a call that was applied, and all else that it reports.
create or replace function runguard.note() returns trigger language plpgsql as $$
declare
    r runguard.record;
    v_kind text := new.kind;
    v_occasion text := '';
begin
    select * into r from runguard.record k where k.id = new.record_id;
    if v_kind in ('failed', 'poison', 'ask_timed_out') then
        if not r.needs_person then
            return null;
        end if;
        v_kind := 'needs_person';
        v_occasion := r.fence;
    elsif v_kind = 'in_doubt' then
        v_occasion := extract(epoch from coalesce((select max(c.first_unknown_at) from runguard.call c
            where c.record_id = r.id and c.generation = r.generation and c.state in ('started', 'in_doubt')), r.first_unknown_at));
    elsif v_kind = 'late_outcome' then
        v_occasion := new.fence || case when new.detail::json ->> 'effect' = 'applied' then ':' || (new.detail::json ->> 'call') else '' end;
    end if;
    insert into runguard.notice (deployment, record_id, generation, kind, occasion, reason)
    values (coalesce(r.deployment, (select m.deployment from runguard.meta m)), coalesce(new.record_id, 0),
            case when new.record_id is null then new.id else coalesce(new.generation, 0) end, v_kind, v_occasion, new.reason)
    on conflict do nothing;
    return null;
end $$;
create or replace trigger note after insert on runguard.event for each row
    when (new.kind in ('in_doubt', 'failed', 'poison', 'late_outcome', 'ask_timed_out', 'ledger_lost_time', 'restore_acknowledged'))
    execute function runguard.note();

-- What no event tells of. A broken line is told of once until it is repaired; time that is lost, once until a person
-- acknowledges it, whichever record met it first (where it was booked, its event has told of it); all else once for each occasion.
create or replace function runguard.tell(
    p_deployment text, p_record_id bigint, p_generation bigint, p_kind text, p_reason text, p_occasion text
) returns boolean language plpgsql as $$
declare
    m runguard.meta;
begin
    perform runguard.pin();
    if p_kind = 'ledger_lost_time' then
        select * into strict m from runguard.meta;
        if m.lost is not null then
            return false;
        end if;
        p_record_id := 0;
        p_generation := 0;
        p_occasion := 'epoch ' || m.epoch;
    elsif p_kind = 'broken' then
        p_occasion := concat_ws(' ', nullif(p_occasion, ''), 'repair', (select max(e.id) from runguard.event e
            where e.record_id = p_record_id and e.kind = 'repaired'));
    end if;
    insert into runguard.notice (deployment, record_id, generation, kind, reason, occasion)
    values (p_deployment, p_record_id, p_generation, p_kind, p_reason, p_occasion) on conflict do nothing;
    return found;
end $$;

-- Takes what is to be sent. Who took it and died is replaced after five minutes: told twice is better than never.
create or replace function runguard.take_notices(p_deployment text, p_actor text, p_limit integer)
returns setof runguard.notice language sql as $$
    update runguard.notice n set taken_at = clock_timestamp(), taken_by = p_actor
     where n.id in (select k.id from runguard.notice k where k.sent_at is null and k.deployment = p_deployment
                       and (k.taken_at is null or k.taken_at < clock_timestamp() - interval '5 minutes')
                     order by k.id limit p_limit for update skip locked)
    returning n.*
$$;

-- p_error = null: it was sent.
create or replace function runguard.notice_sent(p_id bigint, p_error text) returns void language sql as $$
    update runguard.notice n set sent_at = case when p_error is null then clock_timestamp() end, error = p_error where n.id = p_id
$$;

create or replace function runguard.count_prevented(p_record bigint, p_deployment text, p_kind text) returns void language sql as $$
    insert into runguard.prevented (record_id, deployment, kind) values (p_record, p_deployment, p_kind)
    on conflict (kind, record_id) do update set times = prevented.times + 1, at = clock_timestamp()
$$;

-- Its stored result was given back; a former name's is that of the record itself.
create or replace function runguard.count_replay(p_deployment text, p_namespace text, p_key text) returns void language plpgsql as $$
begin
    perform set_config('synchronous_commit', 'off', true);      -- a count; nothing hangs on it
    perform runguard.count_prevented(coalesce(r.renamed_to, r.id), p_deployment, 'replay') from runguard.record r
      where r.deployment = p_deployment and r.namespace = p_namespace and r.key = p_key;
end $$;
