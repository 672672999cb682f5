-- The ledger's tables. What must never be true of a line, or happen to it, a trigger refuses (rules.sql): PostgreSQL
-- parses a CHECK anew for every statement, and these would cost a fifth of a guarded call.
-- Times are the database's clock_timestamp(), never a worker's; now() stands still while a statement waits for a lock.

create schema if not exists runguard;

-- Which ledger this is, and whether it still is the one it was (P14).
create table runguard.meta (
    one               boolean primary key default true check (one),
    installation      uuid not null default gen_random_uuid(),      -- salts the vendor keys
    deployment        text not null check (length(deployment) between 1 and 128),
    schema_version    integer not null,
    system_identifier bigint not null,
    timeline          text not null,
    database_oid      bigint not null,
    epoch             integer not null default 1,                   -- rises when a person acknowledges lost time
    lost              text,                                         -- why time is known to be lost; null = it is not
    freezes           integer not null default 0,                   -- in force (see freeze); 0 spares every claim the look
    unknown_before    timestamptz                                   -- absent keys of runs older than this are in doubt
);

-- The arrows of the state machine; the rows come from TRANSITIONS in record.py.
create table runguard.transition (
    source text not null,
    target text not null,
    primary key (source, target)
);

create table runguard.record (
    id               bigint generated always as identity primary key,
    deployment       text not null,
    namespace        varchar(512) collate "C" not null,     -- in the order of its bytes: a prefix is a range of the index
    key              varchar(512) collate "C" not null,
    generation       integer not null default 1,
    state            text not null,
    failure_class    text,
    effect           text,
    completeness     text not null default 'none',
    needs_person     boolean not null default false,
    fence            bigint not null default 0,
    claims           integer not null default 0,                            -- since the last booked outcome
    pauses           integer not null default 0,                            -- since the last progress
    paused_since     timestamptz,                                           -- the first of these pauses
    open_calls       integer not null default 0,
    late_applied     integer not null default 0,                            -- "applied" reported by stale holders
    -- the holder, or the last one
    nonce            text,
    ti_id            text,
    dag_id           text,
    task_id          text,
    run_id           text,
    try_number       integer,
    map_index        integer,
    host             text,
    pid              integer,
    handed_over      boolean not null default false,        -- the holder waits in Airflow; the same ti_id may re-enter
    claimed_at       timestamptz,
    lease_until      timestamptz,
    hold_until       timestamptz,                           -- max_hold: no renewal reaches beyond it
    no_later_than    timestamptz,                           -- before it, an open call may still reach the vendor
    resume_at        timestamptz,                           -- paused, or in doubt or keeping its place, and at a gate: its turn
    gate             varchar(512),                          -- the vendor allowance that it asks before each call
    first_intent_at  timestamptz,                           -- of this generation; from then on the payload binds
    first_unknown_at timestamptz,                           -- sticky: cleared only by a result, a look-up or a person
    -- the order
    calls            text not null,
    on_doubt         text not null,
    payload_version  smallint not null,
    payload_digest   text not null,
    payload_fields   text not null,                         -- JSON: field -> digest
    payload_readable text not null,                         -- JSON: what a person or a reconciler can look up by
    payload_accepted boolean not null default false,        -- a person lets the next claim bring another payload
    partition        text,                                  -- of Airflow's run: date or key
    amount           numeric,                               -- what is at stake, where the author says so
    currency         text,
    progress         text not null default '{}',            -- JSON: how far a batch is
    -- the result
    store_result     text not null,
    result           bytea,
    result_digest    bytea,
    result_missing   text,                                  -- why a result that should be there is not
    error            text not null default '',
    evidence         text not null default '',
    created_at       timestamptz not null default clock_timestamp(),
    updated_at       timestamptz not null default clock_timestamp(),
    finished_at      timestamptz,
    known_since      timestamptz not null default clock_timestamp(),        -- entered, or spoken of as a whole by a person; epoch: only observed
    renamed_to       bigint,                                -- a former name of that record: nothing is called under it
    row_version      smallint not null default 1,
    digest_version   smallint not null default 1,
    digest           bytea not null,
    unique (deployment, namespace, key)
) with (fillfactor = 70);

-- Everything that may need somebody; renewals of a lease stay out of the index.
create index record_unfinished on runguard.record (state, id) where state <> 'done';
create index record_needs_person on runguard.record (id) where needs_person or state = 'in_doubt';
-- How a page finds the records of a DAG (and those that its reader may see), and of a run or task instance.
create index record_of_dag on runguard.record (dag_id, id);
create index record_of_run on runguard.record (run_id, id);
create index record_waits_at on runguard.record (deployment, gate, resume_at) where resume_at is not null;

create table runguard.call (
    record_id        bigint not null,
    generation       integer not null,
    name             varchar(512) not null,
    state            text not null,
    attempt          integer not null default 1,            -- of the vendor key
    fence            bigint not null,
    intent           text,                                  -- JSON: readable arguments
    external_id      text,                                  -- the vendor's own name for what was submitted
    submitted        boolean not null default false,        -- a later holder attaches to it by that name, and sends nothing
    intent_at        timestamptz,
    no_later_than    timestamptz,
    first_intent_at  timestamptz,                           -- under this vendor key
    first_unknown_at timestamptz,
    outcome_at       timestamptz,
    resume_at        timestamptz,
    gate_epoch       integer,                               -- of its gate as its intent saw it
    failure_class    text,
    effect           text,
    final            boolean not null default false,        -- refused for good: the vendor keeps that answer
    same_again       boolean not null default false,        -- sent again, the same unknown answer came back
    late_applied     boolean not null default false,        -- a stale holder says so: "not applied" is said of the newer attempt
    earlier_key      boolean not null default false,        -- and may mean a vendor key before the present one
    error            text not null default '',
    evidence         text not null default '',
    result           bytea,
    result_digest    bytea,
    result_missing   text,
    -- an item of a batch: its name is the item's key
    payload_digest   text,                                  -- of the item as it was planned
    planned          bigint,                                -- the last entry (its fence) whose list named it, not done
    claims           integer not null default 0,            -- intents since the last booked outcome
    primary key (record_id, generation, name)
) with (fillfactor = 70);
-- The calls in doubt of a record, among a million (rules.sql: each has the moment). Not by state, which every call changes.
create index call_in_doubt on runguard.call (record_id, generation, name) where first_unknown_at is not null;

-- Items that were done before the entry of that fence, and that its list names: their own lines stay as they are. Of each
-- record the last such list is kept, by which its results are read.
create table runguard.listed (
    record_id  bigint not null,
    fence      bigint not null,
    names      text[] not null
);
create index listed_of_record on runguard.listed (record_id, fence);

-- Append-only: what happened, when, by whom, why.
create table runguard.event (
    id         bigint generated always as identity primary key,
    at         timestamptz not null default clock_timestamp(),
    record_id  bigint,                                      -- null: about the ledger itself
    generation integer,
    fence      bigint,
    kind       text not null,
    actor      text not null,
    reason     text not null default '',
    detail     text not null default '{}',                  -- JSON
    mark       text                                         -- the holder's nonce: tells events of one number apart (P14)
);
create index event_of_record on runguard.event (record_id, id);

-- One allowance of one vendor, shared by all tasks that name it (quota=). Closed until a time; those that wait are let
-- through one by one, each at the slot that it reserved.
create table runguard.gate (
    deployment   text not null,
    name         varchar(512) not null,
    epoch        integer not null default 1,                -- rises when a person opens it: an older answer closes nothing
    closed_until timestamptz not null default '-infinity',
    next_slot    timestamptz not null default '-infinity',  -- the last slot that was given away
    rate         double precision check (rate > 0),         -- slots a second; null = [runguard] resume_rate
    why          text not null default '',
    actor        text not null default '',
    by_person    boolean not null default true,             -- else why and actor are of one task: not for the others
    updated_at   timestamptz not null default clock_timestamp(),
    primary key (deployment, name)
);

-- No new call starts in its scope until it is thawed. Its line stays as history.
create table runguard.freeze (
    id          bigint generated always as identity primary key,
    deployment  text not null,
    scope       text not null check (scope in ('all', 'dag_id', 'namespace', 'key_prefix')),
    value       text not null default '',
    at          timestamptz not null default clock_timestamp(),
    actor       text not null,
    reason      text not null,
    thawed_at   timestamptz,
    thawed_by   text,
    thaw_reason text
);
create unique index freeze_in_force on runguard.freeze (deployment, scope, value) where thawed_at is null;

-- What people are to be told, booked with the change that it tells of; sent once, by whoever takes it first.
create table runguard.notice (
    id         bigint generated always as identity primary key,
    deployment text not null,
    record_id  bigint not null default 0,                   -- 0 = about the ledger itself
    generation bigint not null default 0,                   -- of the record; of the ledger: the event's number
    kind       text not null,
    at         timestamptz not null default clock_timestamp(),
    reason     text not null default '',
    taken_at   timestamptz,
    taken_by   text,
    sent_at    timestamptz,
    error      text,                                        -- why it could not be sent
    occasion   text not null default '',                    -- which one of its kind: each is told once
    unique (record_id, generation, kind, occasion)
);
create index notice_unsent on runguard.notice (id) where sent_at is null;

-- A task that is parked in Airflow with a form about a record in doubt.
create table runguard.question (
    ti_id      text primary key,
    record_id  bigint not null,
    generation integer not null,
    fence      bigint not null,                             -- of the doubt that the form tells of
    dag_id     text not null,
    task_id    text not null,
    run_id     text not null,
    map_index  integer not null,
    at         timestamptz not null,                        -- it knows of no doubt that is younger
    closed_at  timestamptz
);
create index question_open on runguard.question (record_id) where closed_at is null;

-- Triggerers that watch this ledger, so that a task knows whether somebody would wake it.
create table runguard.watcher (
    name       text primary key,
    at         timestamptz not null,
    waits      integer not null default 0
);

-- Whose effect would have happened twice: records whose stored result was given back instead of calling again, and records
-- that came in doubt. Of these a number leads to a list; no promise hangs on it.
create table runguard.prevented (
    record_id  bigint not null,
    deployment text not null,                               -- the record's: who may see all is told without its line
    kind       text not null check (kind in ('replay', 'doubt')),
    times      bigint not null default 1,
    at         timestamptz not null default clock_timestamp(),  -- the last time
    primary key (kind, record_id)
);
create index prevented_lately on runguard.prevented (deployment, kind, at);

-- How many records stand where, and how many of those that began in an hour or day, so that nobody counts lines. A change
-- of state appends one line to tally_change, which waits for nobody; runguard.fold() adds those lines up now and then.
-- Both together are exact.
create table runguard.tally (
    deployment    text not null,
    dag_id        text not null,
    state         text not null,                            -- running: only those that wait at a gate, keeping their place
    failure_class text not null,
    needs_person  boolean not null,
    currency      text not null,
    gate          text not null,                            -- at which they wait; '' = at none
    n             bigint not null,
    amount        numeric not null,
    primary key (deployment, dag_id, state, failure_class, needs_person, currency, gate)
);
create table runguard.tally_change (
    began         timestamptz not null,                     -- the record did
    deployment    text not null,
    dag_id        text not null,
    state         text not null,
    failure_class text not null,
    needs_person  boolean not null,
    currency      text not null,
    gate          text not null,
    n             smallint not null check (n in (-1, 1)),
    amount        numeric not null
);
create table runguard.pulse (
    deployment text not null,
    span       text not null check (span in ('hour', 'day')),
    at         timestamptz not null,                        -- when they began
    dag_id     text not null,
    state      text not null,
    n          bigint not null,
    primary key (deployment, span, at, dag_id, state)
);

-- One recurring job: which of its records had the turn last, so that two of them never begin together.
create table runguard.series (
    deployment text not null,
    name       varchar(512) not null,
    record_id  bigint,
    taken_at   timestamptz,
    primary key (deployment, name)
);

-- Where the records of a series stand in its order.
create table runguard.place (
    deployment text not null,
    series     varchar(512) not null,
    place      varchar(512) collate "C" not null,           -- sorts as it is to be ordered, byte by byte
    record_id  bigint not null,
    primary key (deployment, series, place)
);

create function runguard.refuse_change() returns trigger language plpgsql as $$
begin
    raise exception 'runguard.% is append-only: % refused', tg_table_name, tg_op;
end $$;
create trigger append_only before update or delete on runguard.event
    for each row execute function runguard.refuse_change();
create trigger never_deleted before delete on runguard.record
    for each row execute function runguard.refuse_change();
create trigger never_deleted before delete on runguard.call
    for each row execute function runguard.refuse_change();
create trigger never_emptied before truncate on runguard.event execute function runguard.refuse_change();
create trigger never_emptied before truncate on runguard.record execute function runguard.refuse_change();
create trigger never_emptied before truncate on runguard.call execute function runguard.refuse_change();
