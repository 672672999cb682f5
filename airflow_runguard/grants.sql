-- Which rights on the ledger the connected role lacks: to read (list, show, explain), and to write (tasks, and commands that
-- change something). Asks the catalogue alone, so it needs no right itself. No sequence is in it, since identity columns
-- need no right on theirs, and no trigger's function, which runs for whoever writes to its table.
with written(tab, privileges) as (values
    ('meta', '{update}'::text[]), ('transition', '{}'), ('record', '{insert,update}'), ('call', '{insert,update}'),
    ('listed', '{insert,delete}'), ('event', '{insert}'), ('gate', '{insert,update}'), ('freeze', '{insert,update}'),
    ('notice', '{insert,update}'), ('question', '{insert,update}'), ('watcher', '{insert,update,delete}'),
    ('prevented', '{insert,update}'), ('tally', '{insert,update}'), ('tally_change', '{insert,delete}'),
    ('pulse', '{insert,update,delete}'), ('series', '{insert,update}'), ('place', '{insert}')),
needed as (
    select case privilege when 'select' then 'read' else 'write' end as purpose, privilege, c.oid, w.tab
      from written w cross join unnest('{select}' || w.privileges) privilege
      join pg_class c on c.relname = w.tab and c.relkind = 'r'
      join pg_namespace n on n.oid = c.relnamespace and n.nspname = 'runguard'),
lacked as (
    select 1 as part, 'read' as purpose, 'usage on schema' as granted, 'runguard' as object
      from pg_namespace n where n.nspname = 'runguard' and not has_schema_privilege(n.oid, 'usage')
    union all
    select 2, n.purpose, n.privilege || ' on', 'runguard.' || n.tab from needed n where not has_table_privilege(n.oid, n.privilege)
    union all
    select 3, 'read', 'execute on function', format('runguard.%I(%s)', p.proname, pg_get_function_identity_arguments(p.oid))
      from pg_proc p join pg_namespace n on n.oid = p.pronamespace and n.nspname = 'runguard'
     where p.prorettype <> 'trigger'::regtype and not has_function_privilege(p.oid, 'execute'))
select exists (select from pg_namespace where nspname = 'runguard') as there, quote_ident(current_user) as role,
       not exists (select from needed n where n.purpose = 'write' and has_table_privilege(n.oid, n.privilege)) as only_reads,
       l.purpose, l.granted, array_agg(l.object order by l.object) as objects
  from (select) as one left join lacked l on true
 group by l.part, l.purpose, l.granted order by l.part, l.purpose, l.granted
