-- The roll-up behind the pages' numbers (see tally in tables.sql). It decides nothing and no promise hangs on it. A former
-- name of a record is no further one. What runs is not counted, but for those that keep their place and wait at a gate.

create or replace function runguard.count_record() returns trigger language plpgsql as $$
begin
    if tg_op = 'UPDATE' then
        if (old.state <> 'running' or old.resume_at is not null) and old.renamed_to is null then
            insert into runguard.tally_change
                   (began, deployment, dag_id, state, failure_class, needs_person, currency, gate, n, amount)
            values (old.created_at, old.deployment, coalesce(old.dag_id, ''), old.state, coalesce(old.failure_class, ''), old.needs_person,
                    coalesce(old.currency, ''), case when old.resume_at is null then '' else coalesce(old.gate, '') end,
                    -1, -coalesce(old.amount, 0));
        end if;
        if new.state = 'running' and new.resume_at is null or new.renamed_to is not null then
            return null;
        end if;
    end if;
    insert into runguard.tally_change
           (began, deployment, dag_id, state, failure_class, needs_person, currency, gate, n, amount)
    values (new.created_at, new.deployment, coalesce(new.dag_id, ''), new.state, coalesce(new.failure_class, ''), new.needs_person,
            coalesce(new.currency, ''), case when new.resume_at is null then '' else coalesce(new.gate, '') end,
            1, coalesce(new.amount, 0));
    if new.state = 'in_doubt' and (tg_op = 'INSERT' or old.state <> 'in_doubt') then
        perform runguard.count_prevented(new.id, new.deployment, 'doubt');
    end if;
    return null;
end $$;

-- After the write, not before it: an insert that met a conflict counts nothing.
create or replace trigger count_new after insert on runguard.record for each row
    when (new.state <> 'running' and new.renamed_to is null) execute function runguard.count_record();
create or replace trigger count_moved after update on runguard.record for each row
    when (not (old.state = 'running' and new.state = 'running' and old.resume_at is null and new.resume_at is null) and (
          old.state <> new.state or old.renamed_to is distinct from new.renamed_to or old.needs_person <> new.needs_person
          or old.failure_class is distinct from new.failure_class or old.dag_id is distinct from new.dag_id
          or old.currency is distinct from new.currency or old.amount is distinct from new.amount
          or (old.resume_at is null) <> (new.resume_at is null)
          or new.resume_at is not null and old.gate is distinct from new.gate))
    execute function runguard.count_record();

-- Adds the changes up, one caller at a time; whoever comes second, or may not, leaves it to others: a sweep must not fail
-- for the sake of a count.
create or replace function runguard.fold() returns void language plpgsql as $$
begin
    if not (select bool_and(has_table_privilege('runguard.' || t.name, t.word))
              from (values ('tally_change', 'delete'), ('tally', 'insert'), ('tally', 'update'), ('pulse', 'insert'),
                           ('pulse', 'update'), ('pulse', 'delete')) t (name, word))
       or not pg_try_advisory_xact_lock(hashtext('runguard.tally')) then
        return;
    end if;
    with gone as (
        delete from runguard.tally_change returning *
    ), counted as (
        insert into runguard.tally as t
               (deployment, dag_id, state, failure_class, needs_person, currency, gate, n, amount)
        select g.deployment, g.dag_id, g.state, g.failure_class, g.needs_person, g.currency, g.gate, sum(g.n), sum(g.amount)
          from gone g group by 1, 2, 3, 4, 5, 6, 7
        on conflict (deployment, dag_id, state, failure_class, needs_person, currency, gate)
        do update set n = t.n + excluded.n, amount = t.amount + excluded.amount
    )
    insert into runguard.pulse as p (deployment, span, at, dag_id, state, n)
    select g.deployment, s.span, date_trunc(s.span, g.began, 'UTC'), g.dag_id, g.state, sum(g.n)
      from gone g cross join (values ('hour'), ('day')) s (span) where g.state <> 'running'
     group by 1, 2, 3, 4, 5 having sum(g.n) <> 0
    on conflict (deployment, span, at, dag_id, state) do update set n = p.n + excluded.n;
    delete from runguard.pulse p where p.span = 'hour' and p.at < clock_timestamp() - interval '3 days';
end $$;
