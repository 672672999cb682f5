-- The rules that hold for every write, whoever makes it: digest, transitions, fence. (create or replace: installed
-- afresh by every `db upgrade`.)

-- Which physical ledger a session is connected to. A new timeline is a failover or a restore; another system
-- identifier or database is a copy.
create or replace function runguard.whereabouts(
    out system_identifier bigint, out timeline text, out database_oid bigint
) language plpgsql as $$
begin
    system_identifier := (pg_control_system()).system_identifier;
    timeline := substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8);
    database_oid := (select d.oid from pg_database d where d.datname = current_database());
end $$;

-- P14: why this ledger may not be used ('' = it may). A server process cannot move to another system or database, so
-- those two are looked at once a process; its timeline can change under it.
create or replace function runguard.lost_time_closely(m runguard.meta) returns text language plpgsql as $$
declare
    w runguard.meta;
begin
    if m.lost is not null then
        return m.lost;
    end if;
    select * into w.system_identifier, w.timeline, w.database_oid from runguard.whereabouts();
    if m.system_identifier <> w.system_identifier or m.database_oid <> w.database_oid then
        return 'the ledger was copied or restored: it is not on the server or database that it was set up on';
    elsif m.timeline <> w.timeline then
        return 'the ledger failed over or was restored: its server runs on another timeline than before';
    end if;
    perform set_config('runguard.seen', m.installation || ':' || m.epoch, false);
    return '';
end $$;
create or replace function runguard.lost_time(m runguard.meta) returns text language sql volatile as $$
    select case when m.lost is null and m.timeline = substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8)
                     and current_setting('runguard.seen', true) = m.installation::text || ':' || m.epoch::text
                then '' else runguard.lost_time_closely(m) end
$$;

-- The three rules of one line. Each is one expression, so that PostgreSQL sets it into the statement that asks: PL/pgSQL
-- would set it up anew in each transaction, and a CHECK is parsed anew by each statement.

-- The digest over the promised columns (version 1): not over lease, progress or anything merely shown. The same under
-- every TimeZone, DateStyle and float setting; U+001F keeps the columns apart, U+001E stands for null, and what a person
-- or a program named has no control characters.
create or replace function runguard.record_digest(r runguard.record) returns bytea
language sql stable parallel safe as $$
    select sha256(convert_to(array_to_string(array[
        r.row_version::text, r.deployment, r.namespace, r.key, r.generation::text, r.state, r.failure_class, r.effect,
        r.completeness, r.needs_person::text, r.fence::text, r.open_calls::text, r.calls, r.payload_version::text,
        r.payload_digest, r.payload_accepted::text, r.store_result, encode(r.result_digest, 'hex'),
        extract(epoch from r.no_later_than)::text, extract(epoch from r.resume_at)::text,
        extract(epoch from r.first_intent_at)::text, extract(epoch from r.first_unknown_at)::text, r.result_missing],
        E'\x1f', E'\x1e') || coalesce(E'\x1f' || r.renamed_to, ''), 'UTF8'))
$$;

-- Why a line cannot be true ('' = it can). Nobody may write such a line (the trigger below), and who reads one all the
-- same calls it broken.
create or replace function runguard.contradiction(r runguard.record) returns text
language sql stable parallel safe as $$
    select case
        when (r.state in ('pending', 'running', 'done', 'failed', 'paused', 'in_doubt')) is not true
            then format('its state is %L, which does not exist', r.state)
        when r.failure_class not in ('timeout', 'quota', 'validation', 'processing', 'planning', 'unknown')
          or r.effect not in ('not_applied', 'unknown', 'applied') or r.completeness not in ('full', 'partial', 'none')
          or r.calls not in ('body', 'explicit', 'batch') or r.on_doubt not in ('ask', 'replay', 'reconcile')
          or r.store_result not in ('all', 'digest', 'none')
            then 'one of its words does not exist'
        when r.result is not null and r.result_digest is null
          or r.state = 'done' and r.result_missing is null and (r.store_result <> 'none' and r.result_digest is null
                                                                or r.store_result = 'all' and r.result is null)
            then 'it is done, but its result is gone'
        when r.state = 'done' and (r.finished_at is null or r.open_calls <> 0 or r.lease_until is not null or r.needs_person
                                   or r.effect is distinct from 'applied' or r.failure_class is not null
                                   or r.completeness = 'none')
            then 'it is done, but its other columns say that it is not'
        when r.state <> 'done' and (r.finished_at is not null or r.completeness <> 'none')
          or (r.state = 'running') <> (r.lease_until is not null)
          or r.state = 'running' and (r.nonce is null or r.fence <= 0)
          or r.open_calls < 0 or r.open_calls > 0 and (r.no_later_than is null or r.state not in ('running', 'in_doubt'))
          or r.state = 'failed' and (r.failure_class is null or r.effect is null)
          or r.state = 'paused' and r.resume_at is null
          or r.state = 'in_doubt' and (r.first_unknown_at is null or r.effect is distinct from 'unknown')
          or r.needs_person and r.state not in ('failed', 'in_doubt')
          or r.renamed_to is not null and (r.state not in ('done', 'failed') or r.effect = 'not_applied' or r.needs_person)
            then format('its columns contradict its state %L', r.state)
        else '' end
$$;

-- P8: why a line that is there cannot be read ('' = it can).
create or replace function runguard.broken(r runguard.record) returns text
language sql stable parallel safe as $$
    select case
        when r.row_version <> 1 or r.digest_version <> 1
            then format('its row is of version %s, which this ledger cannot read', greatest(r.row_version, r.digest_version))
        when runguard.record_digest(r) is distinct from r.digest and (r.state in ('pending', 'running', 'done', 'failed', 'paused', 'in_doubt'))
            then 'its digest does not match: it was changed outside airflow_runguard, or damaged'
        when r.result is not null and sha256(r.result) <> r.result_digest
            then 'its result was truncated or changed'
        else runguard.contradiction(r) end
$$;

-- Called first by every function that may write. The functions decide on rows that they read again after waiting for
-- a lock, which only READ COMMITTED gives; and a commit that is not durable is no intent.
create or replace function runguard.pin() returns void language plpgsql as $$
begin
    if current_setting('transaction_isolation') <> 'read committed' then
        raise exception 'airflow_runguard needs READ COMMITTED, this session has %',
            current_setting('transaction_isolation') using errcode = 'RG001';
    end if;
end $$;

-- Turns on durable commit and marks this transaction's writes as ours, so that the trigger below renews the digest.
-- Always true, so that a statement can ask for it in the condition of its write.
create or replace function runguard.opened() returns boolean language sql volatile as $$
    select (current_setting('synchronous_commit') <> 'off' or set_config('synchronous_commit', 'on', true) = 'on')
       and set_config('runguard.writing', 'on', true) = 'on'
$$;
create or replace function runguard.open_for_writing() returns void language plpgsql as $$
begin
    perform runguard.opened();
end $$;

-- Whoever waits looks again as soon as this is committed (a watcher that cannot listen looks twice a second anyway). For
-- changes by hand only: PostgreSQL lets one transaction that notifies commit at a time.
create or replace function runguard.stir() returns void language sql as $$ select pg_notify('runguard', '') $$;

-- How every change that a person or a look-up makes begins: the line locked, and why it is refused before anything of it
-- is asked (null = it is not). p_seen_fence: what the asker had looked at; null = it does not matter.
create or replace function runguard.look(p_record_id bigint, p_seen_fence bigint, out r runguard.record, out refused text)
language plpgsql as $$
begin
    perform runguard.pin();
    perform runguard.open_for_writing();
    select * into r from runguard.record k where k.id = p_record_id for update;
    refused := case when not found then 'missing'
                    when runguard.broken(r) <> '' then 'broken'
                    when r.fence <> p_seen_fence then 'moved'
                    when r.renamed_to is not null then 'renamed' end;
    perform runguard.stir();
end $$;

-- What a former name leads to: the present name of its record, as (namespace, key); null = it is a record of its own.
create or replace function runguard.present_name(r runguard.record) returns text[] language sql stable as $$
    select array[k.namespace, k.key]::text[] from runguard.record k where k.id = r.renamed_to
$$;

create or replace function runguard.check_record() returns trigger language plpgsql as $$
declare
    v_writing text := current_setting('runguard.writing', true);
begin
    if tg_op = 'UPDATE' then
        if new.fence < old.fence or new.generation < old.generation then
            raise exception 'record %: fence and generation never fall', old.id;
        end if;
        if (new.state <> old.state or new.fence <> old.fence) and v_writing is distinct from 'repair'
           and (old.renamed_to is null or new.renamed_to is null) then      -- a former name has no life of its own
            if not exists (select from runguard.transition t where t.source = old.state and t.target = new.state) then
                raise exception 'record %: no transition from % to %', old.id, old.state, new.state;
            elsif new.state = 'running' and new.fence <= old.fence then
                raise exception 'record %: every entry into running raises the fence', old.id;
            elsif old.state = 'done' and new.state in ('running', 'in_doubt') and new.calls <> 'batch' then
                raise exception 'record %: only a batch, whose list may have grown, goes on after done', old.id;
            elsif old.state in ('done', 'failed') and new.state = 'pending' and new.generation = old.generation then
                raise exception 'record %: from % to pending only by a new generation', old.id, old.state;
            end if;
        end if;
    end if;
    if v_writing is distinct from 'repair' and runguard.contradiction(new) <> '' then   -- repair asks afterwards
        raise exception 'record %: %', new.id, runguard.contradiction(new) using errcode = 'check_violation';
    elsif v_writing in ('on', 'repair') then
        new.resume_at := case when new.state in ('paused', 'in_doubt') or new.handed_over then new.resume_at end;   -- only those wait
        new.updated_at := clock_timestamp();
        new.digest := runguard.record_digest(new);
    end if;
    return new;
end $$;
create or replace trigger check_record before insert or update on runguard.record
    for each row execute function runguard.check_record();

create or replace function runguard.check_call() returns trigger language plpgsql as $$
begin
    if (case new.state when 'started' then new.intent_at is not null and new.no_later_than is not null
                       when 'in_doubt' then new.first_unknown_at is not null
                       else new.state in ('pending', 'done', 'failed', 'paused') end) is not true then
        raise exception 'call % of record %: its columns contradict its state %', new.name, new.record_id, new.state
            using errcode = 'check_violation';
    end if;
    return new;
end $$;
create or replace trigger check_call before insert or update on runguard.call
    for each row when (new.state not in ('pending', 'done', 'failed', 'paused')) execute function runguard.check_call();

-- Books an event in the transaction of the change it tells of; answers its number.
create or replace function runguard.book(
    r runguard.record, p_kind text, p_actor text, p_reason text default '', p_detail text default '{}', p_mark text default null
) returns bigint language plpgsql as $$
declare
    v_id bigint;
begin
    insert into runguard.event (record_id, generation, fence, kind, actor, reason, detail, mark)
    values (r.id, r.generation, r.fence, p_kind, p_actor, p_reason, p_detail, p_mark) returning id into v_id;
    return v_id;
end $$;
