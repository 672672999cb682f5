-- What the pages read. `@name` stands for the block of that name. {cmp}, {edge}, {far} and {dir} are the words of one of
-- the two directions (see board.py): newest first is <, min, max, desc.
--
-- A page looks at no more than %(budget)s lines of each branch, whatever it is asked for and however large the ledger is:
-- beside the records it says how far it has looked (searched_to), and the reader goes on from there.

-- name: seen_by
(%(dags)s::text[] is null or r.dag_id = any (%(dags)s::text[]))

-- name: lately
p.kind = %(prevented)s::text and p.at > (select clock_timestamp() - interval '30 days')

-- name: match
r.deployment = %(deployment)s and @seen_by
          and (%(states)s::text[] is null or r.state = any (%(states)s::text[]))
          and (%(failure_class)s::text is null or coalesce(r.failure_class, 'none') = %(failure_class)s)
          and (%(dag_id)s::text is null or r.dag_id = %(dag_id)s)
          and (%(task_id)s::text is null or r.task_id = %(task_id)s)
          and (%(run_id)s::text is null or r.run_id = %(run_id)s)
          and (%(map_index)s::int is null or r.map_index = %(map_index)s)
          and (%(namespace)s::text is null or r.namespace = %(namespace)s)
          and (%(prefix)s::text is null and r.renamed_to is null or starts_with(r.key, %(prefix)s))
          and (%(partition)s::text is null or r.partition = %(partition)s)
          and (%(gate)s::text is null or r.gate = %(gate)s)
          and (%(currency)s::text is null or r.currency = %(currency)s)
          and (%(holder)s::text is null or %(holder)s in (r.host, r.ti_id, r.run_id))
          and (not %(needs_person)s or r.needs_person or r.state = 'in_doubt')
          and (not %(waiting)s or r.resume_at is not null)
          and (%(prevented)s::text is null or exists (select from runguard.prevented p where p.record_id = r.id and @lately))
          and (%(since)s::timestamptz is null or r.created_at >= %(since)s)
          and (%(until)s::timestamptz is null or r.created_at < %(until)s)

-- name: within
r.id {cmp} %(after)s::bigint and r.id between %(low)s::bigint and %(high)s::bigint order by r.id {dir} limit %(budget)s::int

-- name: line
r.id, r.namespace, r.key, r.generation, r.state, r.failure_class, r.effect, r.needs_person, r.fence, r.open_calls,
       r.dag_id, r.task_id, r.run_id, r.try_number, r.map_index, r.host, r.lease_until, r.claimed_at, r.resume_at,
       r.no_later_than, r.first_unknown_at, r.gate, r.partition, r.amount, r.currency, r.progress, r.error, r.created_at,
       r.updated_at, r.finished_at, runguard.broken(r) as broken

-- name: page
frontier as (
    select {far}(b.edge) as id from (select {edge}(s.id) as edge from scanned s group by s.branch
                                     having count(*) >= %(budget)s::int) b
), found as (
    select s.id from scanned s cross join frontier f where s.fits and (f.id is null or s.id = f.id or f.id {cmp} s.id)
     order by s.id {dir} limit %(limit)s::int
)
select f.id as searched_to, clock_timestamp() as now, @line
  from frontier f left join found x on true left join runguard.record r on r.id = x.id order by r.id {dir}

-- name: page_all
with scanned as materialized (
    select '' as branch, r.id, (@match) as fits from runguard.record r where @within
), @page

-- name: page_person
with scanned as materialized (
    select '' as branch, r.id, (@match) as fits from runguard.record r
     where (r.needs_person or r.state = 'in_doubt') and @within
), @page

-- name: page_state
with scanned as materialized (
    select b.state as branch, x.id, x.fits from unnest(%(states)s::text[]) b (state) cross join lateral (
        select r.id, (@match) as fits from runguard.record r where r.state = b.state and r.state <> 'done' and @within) x
), @page

-- name: page_dag
with scanned as materialized (
    select b.dag_id as branch, x.id, x.fits from unnest(%(branches)s::text[]) b (dag_id) cross join lateral (
        select r.id, (@match) as fits from runguard.record r where r.dag_id = b.dag_id and @within) x
), @page

-- name: page_run
with scanned as materialized (
    select '' as branch, r.id, (@match) as fits from runguard.record r where r.run_id = %(run_id)s and @within
), @page

-- name: page_prevented
with scanned as materialized (
    select '' as branch, r.id, (@match) as fits from (
        select r.id from (select p.record_id as id from runguard.prevented p where p.kind = %(prevented)s::text) r
         where @within) x join runguard.record r on r.id = x.id
), @page

-- name: page_ids
select clock_timestamp() as now, @line from runguard.record r
 where r.id = any (%(ids)s::bigint[]) and r.deployment = %(deployment)s and @seen_by order by r.id desc

-- name: page_name
with scanned as materialized (
    select b.namespace, x.key, x.id, x.fits from unnest(%(branches)s::text[]) b (namespace) cross join lateral (
        select r.key, r.id, (@match) as fits from runguard.record r
         where r.deployment = %(deployment)s and r.namespace = b.namespace
           and r.key >= coalesce(%(prefix)s, '') and (%(beyond)s::text is null or r.key < %(beyond)s)
           and (b.namespace > %(after_namespace)s or r.key > %(after_key)s)
         order by r.key limit %(budget)s::int) x
), frontier as (
    select f.namespace, f.key, (select r.id from runguard.record r where r.deployment = %(deployment)s
           and r.namespace = f.namespace and r.key = f.key) as id from (
        select s.namespace, max(s.key) as key from scanned s group by s.namespace having count(*) >= %(budget)s::int) f
     order by f.namespace limit 1
), found as (
    select s.namespace, s.key, s.id from scanned s left join frontier f on true
     where s.fits and (f.key is null or (s.namespace, s.key) <= (f.namespace, f.key))
     order by s.namespace, s.key limit %(limit)s::int
)
select f.id as searched_id, f.namespace as searched_namespace, f.key as searched_key, clock_timestamp() as now, @line
  from (values (1)) one (n) left join frontier f on true left join found x on true
  left join runguard.record r on r.id = x.id order by x.namespace, x.key

-- name: name_of
select r.id, r.namespace, r.key from runguard.record r where r.id = %(id)s::bigint and r.deployment = %(deployment)s

-- name: namespaces
with recursive n as (
    (select r.namespace from runguard.record r where r.deployment = %(deployment)s order by r.namespace limit 1)
    union all
    select (select r.namespace from runguard.record r where r.deployment = %(deployment)s and r.namespace > n.namespace
             order by r.namespace limit 1) from n where n.namespace is not null
) select n.namespace from n where n.namespace is not null limit %(limit)s::int

-- name: id_at
with recursive half as (
    select coalesce(min(r.id), 0) as low, coalesce(max(r.id), 0) + 1 as high from runguard.record r
     union all
    select case when p.created_at < %(moment)s::timestamptz then p.id + 1 else h.low end,
           case when p.created_at < %(moment)s::timestamptz then h.high else (h.low + h.high) / 2 end
      from half h left join lateral (select r.id, r.created_at from runguard.record r
                                      where r.id >= (h.low + h.high) / 2 order by r.id limit 1) p on true
     where h.low < h.high
) select max(h.low) as id from half h

-- name: tallied
select t.state, t.failure_class, t.needs_person, t.currency, sum(t.n)::bigint as n, sum(t.amount) as amount
  from (select deployment, dag_id, state, failure_class, needs_person, currency, n, amount from runguard.tally
         union all
        select deployment, dag_id, state, failure_class, needs_person, currency, n, amount from runguard.tally_change) t
 where t.deployment = %(deployment)s and t.state <> 'running'
   and (%(dags)s::text[] is null or t.dag_id = any (%(dags)s::text[]))
 group by 1, 2, 3, 4 having sum(t.n) <> 0

-- name: pulses
select p.at, p.state, sum(p.n)::bigint as n
  from (select deployment, dag_id, at, state, n from runguard.pulse
         where deployment = %(deployment)s and span = %(span)s and at >= %(since)s
         union all
        select deployment, dag_id, date_trunc(%(span)s, began, 'UTC'), state, n from runguard.tally_change
         where deployment = %(deployment)s and began >= %(since)s and state <> 'running') p
 where (%(dags)s::text[] is null or p.dag_id = any (%(dags)s::text[])) group by 1, 2 having sum(p.n) <> 0 order by 1

-- name: unfolded
select count(*) as n from (select from runguard.tally_change limit %(limit)s::int) c

-- name: fold
select runguard.fold()

-- name: running
select count(*) as n from (select from runguard.record r where r.state = 'running' and r.deployment = %(deployment)s
                              and @seen_by limit %(limit)s::int) c

-- name: prevented
select count(*) as looked_at, count(*) filter (where p.seen) as n from (
    select %(dags)s::text[] is null or exists (select from runguard.record r where r.id = p.record_id and @seen_by) as seen
      from runguard.prevented p where p.deployment = %(deployment)s and @lately order by p.at desc limit %(limit)s::int) p

-- name: board_gates
with waiting as (
    select t.gate, sum(t.n)::bigint as n
      from (select deployment, dag_id, gate, n from runguard.tally
             union all
            select deployment, dag_id, gate, n from runguard.tally_change) t
     where t.deployment = %(deployment)s and t.gate <> ''
       and (%(dags)s::text[] is null or t.dag_id = any (%(dags)s::text[])) group by 1 having sum(t.n) <> 0
)
select g.name, g.epoch, nullif(g.closed_until, '-infinity') as closed_until, nullif(g.next_slot, '-infinity') as next_slot,
       g.closed_until = 'infinity' as closed_for_good, g.closed_until > clock_timestamp() as closed, g.rate,
       case when g.by_person or %(dags)s::text[] is null then g.why end as why,
       case when %(dags)s::text[] is null then g.actor end as actor,
       g.updated_at, clock_timestamp() as now, coalesce(w.n, 0) as waiting
  from runguard.gate g left join waiting w on w.gate = g.name
 where g.deployment = %(deployment)s
   and case when %(name)s::text is not null then g.name = %(name)s else %(dags)s::text[] is null or w.n is not null end
 order by g.closed_until > clock_timestamp() desc, g.name

-- name: board_freezes
select f.*, clock_timestamp() as now from runguard.freeze f
 where f.deployment = %(deployment)s
   and (%(dags)s::text[] is null or f.scope = 'all' or f.scope = 'dag_id' and f.value = any (%(dags)s::text[]))
 order by f.thawed_at is not null, f.id desc limit %(limit)s::int

-- name: ledger_events
select e.* from runguard.event e where e.record_id is null and e.id < %(before)s::bigint order by e.id desc limit %(limit)s::int

-- name: record
select r.*, runguard.broken(r) as broken, encode(sha256(convert_to(r::text, 'UTF8')), 'hex') as seen,
       runguard.present_name(r) as present_name, clock_timestamp() as now
  from runguard.record r where r.id = %(id)s::bigint and r.deployment = %(deployment)s and @seen_by

-- name: dag_of
select r.dag_id from runguard.record r where r.id = %(id)s::bigint and r.deployment = %(deployment)s

-- name: of_calls
c.record_id = %(id)s::bigint and c.generation = %(generation)s::int and c.name > %(after)s
           and (%(state)s::text is distinct from 'in_doubt' or c.first_unknown_at is not null)

-- name: calls_of
with frontier as (
    select (select c.name from runguard.call c where @of_calls
             order by c.name offset %(budget)s::int - 1 limit 1) as name
), found as (
    select s.* from (
        select c.*, runguard.attachable(c) as attachable from runguard.call c where @of_calls
         order by c.name limit %(budget)s::int) s
     where %(state)s::text is null or s.state = %(state)s order by s.name limit %(limit)s::int
)
select f.name as searched_to, x.* from frontier f left join found x on true order by x.name

-- name: events_of
select e.* from runguard.event e where e.record_id = %(id)s::bigint and e.id < %(before)s::bigint order by e.id desc limit %(limit)s::int

-- name: generations_of
select e.generation, e.at, e.actor, e.reason, e.detail from runguard.event e
 where e.record_id = %(id)s::bigint and e.kind = 'reopened' order by e.id desc limit %(limit)s::int

-- name: replays_of
select p.times, p.at from runguard.prevented p where p.kind = 'replay' and p.record_id = %(id)s::bigint

-- name: names_of
select e.* from runguard.event e where e.record_id = %(id)s::bigint and e.kind = 'renamed' order by e.id

-- name: questions_of
select q.dag_id, q.task_id, q.run_id, q.map_index, q.at from runguard.question q
 where q.record_id = %(id)s::bigint and q.closed_at is null order by q.at
