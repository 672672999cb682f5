-- Gates, pauses and freezes (P6, P12, P13): what keeps a call from starting although its record is free. All of it is
-- looked at in the statement that books the intent, so there is no cache that could lie.

-- Until when a task may not call through this gate (null = it may). Who has not waited yet (p_waited = false) also
-- stands behind those who have a slot.
create or replace function runguard.gate_until(p_deployment text, p_gate text, p_waited boolean default false)
returns timestamptz language sql volatile as $$
    select (select case when g.closed_until > clock_timestamp() then g.closed_until
                        when not p_waited and g.next_slot > clock_timestamp() then g.next_slot end
              from runguard.gate g where g.deployment = p_deployment and g.name = p_gate)
$$;

create or replace function runguard.gate_epoch(p_deployment text, p_gate text) returns integer
language sql volatile as $$
    select case when p_gate is not null then coalesce(
        (select g.epoch from runguard.gate g where g.deployment = p_deployment and g.name = p_gate), 1) end
$$;

-- For all who wait: a person's words, but not what a vendor answered to somebody else's call.
create or replace function runguard.why_closed(p_deployment text, p_gate text) returns text language sql as $$
    select case when g.closed_until > clock_timestamp()
        then format('gate %s is closed until %s: %s', g.name, case when isfinite(g.closed_until)
                    then to_char(g.closed_until at time zone 'UTC', 'YYYY-MM-DD HH24:MI:SS "UTC"')
                    else 'a person opens it' end, case when g.by_person then g.why else 'a call was told to wait' end)
        else format('gate %s lets those through first that waited', g.name) end
      from runguard.gate g where g.deployment = p_deployment and g.name = p_gate
$$;

-- The next free slot behind the gate's end. No task probes: each comes back at a time of its own.
create or replace function runguard.reserve(p_deployment text, p_gate text, p_rate double precision) returns timestamptz
language sql as $$
    update runguard.gate g set next_slot = greatest(g.next_slot, g.closed_until, clock_timestamp())
                                           + make_interval(secs => 1 / coalesce(g.rate, p_rate))
     where g.deployment = p_deployment and g.name = p_gate returning g.next_slot
$$;

-- How late it comes for its turn, in seconds; null = in time. What nobody woke for an hour must not go on all at once, so
-- who comes a minute too late stands in the line again; but the next time it may be twice as late, so that where
-- everything is slow all come to go on. Who was let go on by a person is never late.
create or replace function runguard.late_for_turn(r runguard.record) returns double precision language sql volatile as $$
    select case when l.late > 60 and l.late > coalesce(
        (select case e.kind when 'turn_missed' then 2 * (e.detail::json ->> 'late')::float8 when 'resumed' then l.late end
           from runguard.event e where e.record_id = r.id order by e.id desc limit 1), 0) then l.late end
      from (select extract(epoch from clock_timestamp() - r.resume_at)::float8 as late) l
$$;

-- Null = go; else the slot at which to come back. Who is late goes only where nobody stands before it, and takes that slot,
-- so that the next one that is late does not go, too.
create or replace function runguard.turn(
    p_deployment text, p_gate text, p_rate double precision, p_waited boolean, p_late boolean
) returns timestamptz language plpgsql as $$
begin
    if p_late then
        update runguard.gate g set next_slot = clock_timestamp() + make_interval(secs => 1 / coalesce(g.rate, p_rate))
         where g.deployment = p_deployment and g.name = p_gate and greatest(g.next_slot, g.closed_until) <= clock_timestamp();
        if found then
            return null;
        end if;
    end if;
    if runguard.gate_until(p_deployment, p_gate, p_waited and not p_late) is null then
        return null;
    end if;
    return runguard.reserve(p_deployment, p_gate, p_rate);
end $$;

-- Whose turn was before this stands in the line no more: it did not come for it, and perhaps never will (its run was deleted,
-- its task marked). When it does come, it asks anew.
create or replace function runguard.line_begins() returns timestamptz language sql stable as $$
    select clock_timestamp() - interval '15 seconds'
$$;

-- Gives those in the line new slots, in the order of their old ones; to whom the vendor itself named a later time, that one.
-- What is in doubt only an earlier one: at the one that it has its vendor still knows its key, later perhaps no more.
-- Whoever is being claimed at this moment asks anew.
create or replace function runguard.respace(p_deployment text, p_gate text, p_from timestamptz, p_rate double precision)
returns void language plpgsql as $$
declare
    v_step interval := make_interval(secs => 1 / p_rate);
    v_last timestamptz;
begin
    with waiting as (
        select k.id, k.generation, k.state, k.resume_at from runguard.record k
         where k.deployment = p_deployment and k.gate = p_gate and k.resume_at > runguard.line_begins()
         order by k.resume_at, k.id for update skip locked
    ), spaced as (
        select w.*, p_from + v_step * row_number() over () as slot from waiting w
    ), given as (
        select s.id, s.slot, s.resume_at as old,
               case when s.state = 'in_doubt' then least(s.resume_at, s.slot)
                    else greatest(s.slot, (select max(c.resume_at) from runguard.call c where c.record_id = s.id
                        and c.generation = s.generation and c.state in ('paused', 'started'))) end as new
          from spaced s
    ), moved as (
        update runguard.record k set resume_at = n.new,                 -- a holder that keeps its place stays the holder
               lease_until = case when k.state = 'running' then n.new + interval '10 minutes' end
          from given n where k.id = n.id and n.new <> n.old
    ) select max(n.slot) into v_last from given n;
    update runguard.gate g set next_slot = coalesce(v_last, p_from) where g.deployment = p_deployment and g.name = p_gate;
end $$;

-- A vendor's "not before" (the later one wins), or a person's. p_seen_epoch is what the call saw at its intent: an
-- answer from before a person opened the gate does not close it again.
create or replace function runguard.close_gate(
    p_deployment text, p_gate text, p_until timestamptz, p_rate double precision, p_seen_epoch integer, p_actor text, p_why text
) returns text language plpgsql as $$
declare
    g      runguard.gate;
    v_rate double precision;
    v_line bigint;
begin
    perform runguard.pin();
    perform runguard.open_for_writing();
    insert into runguard.gate (deployment, name) values (p_deployment, p_gate) on conflict do nothing;
    select * into g from runguard.gate k where k.deployment = p_deployment and k.name = p_gate for update;
    if p_seen_epoch < g.epoch then
        return 'old';
    end if;
    if p_seen_epoch is null or (p_until > g.closed_until and g.closed_until <= clock_timestamp()) then
        insert into runguard.event (kind, actor, reason, detail) values ('gate_closed', p_actor, p_why,
            json_build_object('gate', p_gate, 'until', p_until, 'deployment', p_deployment)::text);
    end if;
    if p_until <= g.closed_until then
        return 'ok';
    end if;
    update runguard.gate k set closed_until = p_until, why = p_why, actor = p_actor, by_person = p_seen_epoch is null,
           updated_at = clock_timestamp()
     where k.deployment = p_deployment and k.name = p_gate;
    -- All others wait for this row meanwhile. So nothing moves for less than a second, whose slots then come together; and
    -- a long line leaves a hundredth of its length free, for the calls under way that are told a little more.
    if exists (select from runguard.record k where k.deployment = p_deployment and k.gate = p_gate
                  and k.resume_at > runguard.line_begins() and k.resume_at < p_until - interval '1 second') then
        v_rate := coalesce(g.rate, p_rate);
        select count(*) into v_line from runguard.record k where k.deployment = p_deployment and k.gate = p_gate
           and k.resume_at > runguard.line_begins();
        perform runguard.respace(p_deployment, p_gate, p_until + make_interval(secs => 0.01 * v_line / v_rate), v_rate);
    end if;
    return 'ok';
end $$;

create or replace function runguard.open_gate(
    p_deployment text, p_gate text, p_rate double precision, p_actor text, p_reason text
) returns text language plpgsql as $$
declare
    g runguard.gate;
begin
    perform runguard.pin();
    perform runguard.open_for_writing();
    update runguard.gate k set closed_until = '-infinity', epoch = k.epoch + 1, why = p_reason, actor = p_actor,
           by_person = true, updated_at = clock_timestamp()
     where k.deployment = p_deployment and k.name = p_gate returning * into g;
    if not found then
        return 'missing';
    end if;
    -- Also of what waits no more (its budget of pauses is spent): that goes on when its task is cleared.
    update runguard.call c set resume_at = clock_timestamp() from runguard.record k
     where k.deployment = p_deployment and k.gate = p_gate and k.state <> 'done' and c.record_id = k.id
       and c.generation = k.generation and c.state in ('paused', 'started') and c.resume_at > clock_timestamp();
    perform runguard.respace(p_deployment, p_gate, clock_timestamp(), coalesce(g.rate, p_rate));
    insert into runguard.event (kind, actor, reason, detail) values ('gate_opened', p_actor, p_reason,
        json_build_object('gate', p_gate, 'deployment', p_deployment)::text);
    perform runguard.stir();
    return 'ok';
end $$;

-- p_rate = null: back to [runguard] resume_rate, which the caller says.
create or replace function runguard.set_rate(
    p_deployment text, p_gate text, p_rate double precision, p_default double precision, p_actor text, p_reason text
) returns text language plpgsql as $$
declare
    g runguard.gate;
begin
    perform runguard.pin();
    perform runguard.open_for_writing();
    insert into runguard.gate (deployment, name, rate, actor) values (p_deployment, p_gate, p_rate, p_actor)
    on conflict (deployment, name) do update set rate = p_rate, updated_at = clock_timestamp() returning * into g;
    perform runguard.respace(p_deployment, p_gate, greatest(g.closed_until, clock_timestamp()), coalesce(p_rate, p_default));
    insert into runguard.event (kind, actor, reason, detail) values ('gate_rate', p_actor, p_reason,
        json_build_object('gate', p_gate, 'rate', p_rate, 'deployment', p_deployment)::text);
    perform runguard.stir();
    return 'ok';
end $$;

-- -- the budget of pauses -------------------------------------------------------------------------------------------

create or replace function runguard.pauses_are_spent(
    r runguard.record, p_until timestamptz, p_max_pauses integer, p_max_pause interval
) returns boolean language sql volatile as $$
    select r.pauses >= p_max_pauses or p_until > coalesce(r.paused_since, clock_timestamp()) + p_max_pause
$$;

create or replace function runguard.pauses_spent_says(r runguard.record, p_until timestamptz, p_max_pauses integer) returns text
language sql volatile as $$
    select case when r.pauses >= p_max_pauses
        then format('paused %s time(s) without progress, which is as often as it may (max_pauses); ', r.pauses)
        else format('it would wait from %s to %s without progress, which is longer than it may (max_pause); ',
                    to_char(coalesce(r.paused_since, clock_timestamp()) at time zone 'UTC', 'YYYY-MM-DD HH24:MI:SS'),
                    to_char(p_until at time zone 'UTC', 'YYYY-MM-DD HH24:MI:SS "UTC"')) end
$$;

-- Waiting longer is not allowed: a person. Nothing happened, so a later clear runs it.
create or replace function runguard.spend(
    r runguard.record, p_until timestamptz, p_max_pauses integer, p_actor text, p_why text
) returns runguard.record language plpgsql as $$
begin
    update runguard.record k set state = 'failed', failure_class = 'quota', effect = 'not_applied', needs_person = true,
           lease_until = null, hold_until = null, handed_over = false, resume_at = null, pauses = 0, paused_since = null,
           error = runguard.pauses_spent_says(k, p_until, p_max_pauses) || coalesce(p_why, '')
     where k.id = r.id returning * into r;
    perform runguard.book(r, 'failed', p_actor, r.error);
    return r;
end $$;

-- -- freezes ----------------------------------------------------------------------------------------------------------

-- Whether a freeze is about this.
create or replace function runguard.is_about(
    f runguard.freeze, p_deployment text, p_dag_id text, p_namespace text, p_key text
) returns boolean language sql stable as $$
    select f.deployment = p_deployment
       and case f.scope when 'all' then true when 'dag_id' then f.value = p_dag_id
                        when 'namespace' then f.value = p_namespace else starts_with(p_key, f.value) end
$$;

-- Why nothing may start here (null = it may).
create or replace function runguard.frozen(p_deployment text, p_dag_id text, p_namespace text, p_key text) returns text
language sql stable as $$
    select format('frozen by %s since %s (%s): %s', f.actor, to_char(f.at at time zone 'UTC', 'YYYY-MM-DD HH24:MI:SS "UTC"'),
                  case f.scope when 'all' then 'everything' else replace(f.scope, '_', ' ') || ' ' || f.value end, f.reason)
      from runguard.freeze f
     where f.thawed_at is null and runguard.is_about(f, p_deployment, p_dag_id, p_namespace, p_key)
     order by f.id limit 1
$$;

-- Until when a running record's holder is believed to live: its lease. But who keeps its place cannot come back, and so
-- renews nothing, while a freeze or its gate holds it back: it has ten minutes from when they let it go. A gate holds it for
-- max_hold beyond its slot at most; a freeze for as long as it lasts, since nobody else could call meanwhile either.
create or replace function runguard.believed_until(r runguard.record) returns timestamptz language sql volatile as $$
    select case when r.resume_at is null or r.lease_until > clock_timestamp() then r.lease_until
                else greatest(
        r.lease_until,
        least(r.resume_at + (r.hold_until - r.claimed_at), interval '10 minutes' + coalesce(
            (select case when g.closed_until > clock_timestamp() then 'infinity'
                         when isfinite(g.closed_until) then g.closed_until
                         else g.updated_at end              -- a person opened it
               from runguard.gate g where g.deployment = r.deployment and g.name = r.gate), '-infinity')),
        (select max(coalesce(f.thawed_at, 'infinity')) + interval '10 minutes' from runguard.freeze f
          where runguard.is_about(f, r.deployment, r.dag_id, r.namespace, r.key))) end
$$;

create or replace function runguard.set_freeze(
    p_deployment text, p_scope text, p_value text, p_actor text, p_reason text
) returns text language plpgsql as $$
begin
    perform runguard.pin();
    perform runguard.open_for_writing();
    perform from runguard.meta for update;       -- one at a time: each counts what the others did
    insert into runguard.freeze (deployment, scope, value, actor, reason)
    values (p_deployment, p_scope, p_value, p_actor, p_reason) on conflict do nothing;
    if not found then
        return 'already';
    end if;
    update runguard.meta set freezes = (select count(*) from runguard.freeze f where f.thawed_at is null);
    insert into runguard.event (kind, actor, reason, detail) values ('frozen', p_actor, p_reason,
        json_build_object('scope', p_scope, 'value', p_value, 'deployment', p_deployment)::text);
    return 'ok';
end $$;

create or replace function runguard.thaw(
    p_deployment text, p_scope text, p_value text, p_actor text, p_reason text
) returns text language plpgsql as $$
begin
    perform runguard.pin();
    perform runguard.open_for_writing();
    perform from runguard.meta for update;       -- one at a time: each counts what the others did
    update runguard.freeze f set thawed_at = clock_timestamp(), thawed_by = p_actor, thaw_reason = p_reason
     where f.deployment = p_deployment and f.thawed_at is null and f.scope = p_scope and f.value = p_value;
    if not found then
        return 'missing';
    end if;
    update runguard.meta set freezes = (select count(*) from runguard.freeze f where f.thawed_at is null);
    insert into runguard.event (kind, actor, reason, detail) values ('thawed', p_actor, p_reason,
        json_build_object('scope', p_scope, 'value', p_value, 'deployment', p_deployment)::text);
    perform runguard.stir();
    return 'ok';
end $$;
