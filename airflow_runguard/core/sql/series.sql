-- Series: the ordered line of keys of one recurring job, for "was the previous one finished?". Runs of one series are
-- different records, on which no claim of theirs meets, so those that wait for each other meet on the series' own row.

-- The record that stands before a place; null = none does. p_expected is its place where the caller knows the order
-- ('' = it is the first one; null = not known: the latest earlier one counts). Where a task names no series, its default
-- keys are the places.
create or replace function runguard.before_place(p_deployment text, p_series text, p_place text, p_expected text)
returns bigint language plpgsql as $$
begin
    return case when p_expected = '' then null else (
        select f.id from (
            (select p.record_id as id, p.place from runguard.place p
              where p.deployment = p_deployment and p.series = p_series
                and case when p_expected is null then p.place < p_place else p.place = p_expected end
              order by p.place desc limit 1)
            union all
            (select r.id, r.key collate "C" from runguard.record r
              where r.deployment = p_deployment and r.namespace = p_series
                and case when p_expected is null then r.key collate "C" < p_place and left(r.key, 3) = left(p_place, 3)
                         else r.key = p_expected end
              order by r.key collate "C" desc limit 1)) f
         order by f.place desc limit 1) end;
end $$;

-- Whether the run at a place may begin, by what stands before it: the one rule, for the sensor, its watcher and a guard
-- that waits for its previous one. verdict: go | wait | fail | skip; standing says why.
create or replace function runguard.may_follow(
    p_deployment text, p_series text, p_place text, p_expected text, p_min_gap interval, p_partial boolean,
    p_on_failed text, p_on_absent text,
    out verdict text, out standing text, out name text, out holder text, out why text, out until timestamptz,
    out now timestamptz
) language plpgsql as $$
declare
    v_before bigint;
    r        runguard.record;
begin
    why := (select runguard.lost_time(m) from runguard.meta m);
    now := clock_timestamp();
    if why <> '' then
        verdict := 'wait';
        standing := 'lost_time';
        return;
    end if;
    v_before := runguard.before_place(p_deployment, p_series, p_place, p_expected);    -- volatile: once, not for each row
    select * into r from runguard.record k where k.id = v_before;
    if r.renamed_to is not null then            -- the keys of old were its places
        select * into r from runguard.record k where k.id = r.renamed_to;
    end if;
    if r.id is null then
        standing := case when coalesce(p_expected, '') = '' then 'none' else 'absent' end;
        verdict := case standing when 'none' then 'go' else p_on_absent end;
        name := p_expected;
        return;
    end if;
    name := r.namespace || '/' || r.key;
    why := runguard.broken(r);
    if why <> '' then
        verdict := 'fail';                      -- whatever was asked for: what cannot be read allows nothing
        standing := 'broken';
        return;
    end if;
    why := r.error;
    standing := case when r.state = 'done' and r.completeness = 'partial' and not p_partial then 'partial' else r.state end;
    if r.state = 'running' then
        holder := runguard.holder_of(r);
    end if;
    verdict := case when standing = 'done' then 'go' when standing in ('running', 'pending') then 'wait' else p_on_failed end;
    if verdict = 'go' and coalesce(r.finished_at, r.updated_at) + p_min_gap > now then
        verdict := 'wait';
        standing := 'gap';
        until := coalesce(r.finished_at, r.updated_at) + p_min_gap;
    end if;
end $$;

-- The turn of one record of a series: locks the series' row until the transaction ends, so that of all that look at it
-- together one decides at a time, and the next one sees what it did. Free is it when the record that had it last is not at
-- work any more: settled, or dead and swept, so that no living holder is left beside the next one.
create or replace function runguard.take_turn(
    p_deployment text, p_series text, p_place text, p_expected text, p_min_gap interval, p_partial boolean,
    p_on_failed text, p_on_absent text, p_namespace text, p_key text, p_actor text,
    out verdict text, out standing text, out name text, out holder text, out why text, out until timestamptz,
    out now timestamptz
) language plpgsql as $$
declare
    v_last bigint;
    r      runguard.record;
    b      record;
begin
    perform runguard.pin();
    perform runguard.open_for_writing();
    insert into runguard.series (deployment, name) values (p_deployment, p_series) on conflict do nothing;
    select s.record_id into v_last from runguard.series s
     where s.deployment = p_deployment and s.name = p_series for update;
    select * into r from runguard.record k where k.id = v_last;
    if r.state = 'running' and r.lease_until <= clock_timestamp() and (r.namespace, r.key) <> (p_namespace, p_key) then
        perform runguard.sweep(p_actor, 1000);
        select * into r from runguard.record k where k.id = v_last;
    end if;
    now := clock_timestamp();
    if exists (select from runguard.record k where k.deployment = p_deployment and k.namespace = p_namespace and k.key = p_key
                  and k.state = 'done' and k.calls <> 'batch') then
        verdict := 'go';                        -- to be given back: that takes no turn
        standing := 'replay';
        return;
    elsif r.id is not null and (r.namespace, r.key) = (p_namespace, p_key) and r.state = 'running' then
        verdict := 'go';                        -- it has the turn: a lost answer, or it comes back from a deferral
        standing := 'running';
        return;
    elsif r.id is not null and (r.namespace, r.key) <> (p_namespace, p_key) then
        name := r.namespace || '/' || r.key;
        why := runguard.broken(r);
        if why <> '' then
            verdict := 'fail';
            standing := 'broken';
            return;
        elsif r.state = 'running' or (r.state = 'in_doubt' and r.open_calls > 0 and r.no_later_than > now) then
            verdict := 'wait';
            standing := 'running';
            holder := runguard.holder_of(r);
            return;
        end if;
    end if;
    select * into b from runguard.may_follow(p_deployment, p_series, p_place, p_expected, p_min_gap, p_partial,
                                             p_on_failed, p_on_absent);
    verdict := b.verdict;
    standing := b.standing;
    name := b.name;
    holder := b.holder;
    why := b.why;
    until := b.until;
end $$;

-- Notes where a record stands in its series, and (p_turn) that it has the turn. False = that place is another record's.
create or replace function runguard.take_place(
    p_deployment text, p_series text, p_place text, p_record_id bigint, p_turn boolean
) returns boolean language plpgsql as $$
begin
    perform runguard.pin();
    perform runguard.open_for_writing();
    p_record_id := coalesce((select k.renamed_to from runguard.record k where k.id = p_record_id), p_record_id);
    insert into runguard.place (deployment, series, place, record_id) values (p_deployment, p_series, p_place, p_record_id)
    on conflict do nothing;
    if not exists (select from runguard.place p where p.deployment = p_deployment and p.series = p_series
                      and p.place = p_place and p.record_id = p_record_id) then
        return false;
    end if;
    if p_turn then
        update runguard.series s set record_id = p_record_id, taken_at = clock_timestamp()
         where s.deployment = p_deployment and s.name = p_series;
    end if;
    return true;
end $$;
