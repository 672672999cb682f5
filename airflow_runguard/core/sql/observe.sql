-- Observation: tasks that nothing holds up are booked as they go, so that what they did is known when they are guarded.
-- A hint settles only what an observer held last, or nobody: never the record of a guard's holder (a newer fence).

-- What "this would have been …" says of a record, for a run that begins now; null = nothing would have stopped it.
create or replace function runguard.would_have_been(r runguard.record) returns text language sql volatile as $$
    select case
        when r.renamed_to is not null then format('a duplicate of what is named %s now', array_to_string(runguard.present_name(r), '/'))
        when r.state = 'done' then format('a duplicate of what was done by %s.%s run %s until %s', r.dag_id, r.task_id, r.run_id,
            to_char(r.finished_at at time zone 'UTC', 'YYYY-MM-DD HH24:MI:SS "UTC"'))
        when r.state = 'running' and runguard.believed_until(r) > clock_timestamp() then 'beside ' || runguard.holder_of(r)
        when r.state = 'in_doubt' or (r.state = 'running' and r.open_calls > 0)
            then format('a blind resend: nobody knows what became of %s.%s run %s', r.dag_id, r.task_id, r.run_id)
        when r.state = 'failed' and r.effect <> 'not_applied'
            then format('a resend of what a person gave up: %s.%s run %s', r.dag_id, r.task_id, r.run_id)
        when r.state = 'paused' and r.resume_at > clock_timestamp()
            then format('too early: paused until %s', to_char(r.resume_at at time zone 'UTC', 'YYYY-MM-DD HH24:MI:SS "UTC"'))
        end
$$;

-- p_what: started | done | failed (p_effect says what is known) | skipped. p_payload_digest = '': the observer does not
-- know the order, so it binds nobody. verdict: booked | again (known already) | duplicate (the event alone, with
-- what it would have been) | late (another one holds it) | broken.
create or replace function runguard.observe(
    p_deployment text, p_namespace text, p_key text, p_payload_version smallint, p_payload_digest text,
    p_payload_fields text, p_payload_readable text, p_store_result text, p_what text, p_nonce text,
    p_ti_id text, p_dag_id text, p_task_id text, p_run_id text, p_try_number integer, p_map_index integer,
    p_host text, p_pid integer, p_actor text, p_hold interval, p_partition text,
    p_class text, p_effect text, p_error text, p_result bytea, p_missing text,
    out verdict text, out said text
) language plpgsql set plan_cache_mode = force_generic_plan as $$
declare
    r     runguard.record;
    s     record;
    v_now timestamptz;
    ends  boolean := false;
begin
    perform runguard.pin();
    perform runguard.open_for_writing();
    insert into runguard.record (deployment, namespace, key, state, calls, on_doubt, payload_version, payload_digest,
        payload_fields, payload_readable, store_result, partition, dag_id, task_id, run_id, known_since, digest)
    values (p_deployment, p_namespace, p_key, 'pending', 'body', 'ask', p_payload_version, p_payload_digest,
        p_payload_fields, p_payload_readable, p_store_result, p_partition, p_dag_id, p_task_id, p_run_id, 'epoch', '')
    on conflict do nothing;
    select * into r from runguard.record k
     where k.deployment = p_deployment and k.namespace = p_namespace and k.key = p_key for update;
    v_now := clock_timestamp();
    said := runguard.broken(r);
    if said <> '' then
        verdict := 'broken';
        return;
    elsif exists (select from runguard.event e where e.record_id = r.id and e.mark = p_nonce
                     and e.kind in ('observed_' || p_what, 'observed_again') and e.detail::json ->> 'what' = p_what) then
        verdict := 'again';
        return;
    end if;
    if p_what = 'started' then
        said := runguard.would_have_been(r);
        if said is null and p_payload_digest <> '' and r.first_intent_at is not null and r.payload_digest <> p_payload_digest then
            said := 'refused: it was begun with another payload';
        end if;
        if said is not null then
            verdict := 'duplicate';
        else
            update runguard.record k set state = 'running', fence = k.fence + 1, nonce = p_nonce, ti_id = p_ti_id,
                   dag_id = p_dag_id, task_id = p_task_id, run_id = p_run_id, try_number = p_try_number,
                   map_index = p_map_index, host = p_host, pid = p_pid, handed_over = false, claimed_at = v_now,
                   lease_until = v_now + p_hold, hold_until = v_now + p_hold, no_later_than = v_now + p_hold, open_calls = 1,
                   resume_at = null, failure_class = null, effect = null, needs_person = false, error = '', evidence = '',
                   calls = 'body', store_result = p_store_result, partition = p_partition,
                   payload_version = p_payload_version, payload_digest = p_payload_digest,
                   payload_fields = p_payload_fields, payload_readable = p_payload_readable,
                   first_intent_at = case when p_payload_digest <> '' then coalesce(k.first_intent_at, v_now)
                                          else k.first_intent_at end
             where k.id = r.id returning * into r;
            select * into s from runguard.start_call(r, 'body', null, p_hold, null);
            verdict := 'booked';
        end if;
    elsif r.state = 'done' or r.renamed_to is not null then
        verdict := 'duplicate';
        said := runguard.would_have_been(r);
    elsif r.nonce is distinct from p_nonce and (r.state = 'running' or r.nonce not like 'observed:%') then
        verdict := 'late';
    elsif p_what <> 'done' and r.nonce is distinct from p_nonce then
        verdict := 'late';                      -- an attempt that was never the holder says nothing of the one that was
    else
        verdict := 'booked';
        ends := true;
    end if;
    -- Also where it only begins, and then finds nothing to write: PostgreSQL plans these two in the time for which the
    -- body works, and not in that for which the end of it is waited for.
    update runguard.call c set outcome_at = v_now, error = coalesce(p_error, ''), first_unknown_at = case
               when p_what = 'failed' and p_effect = 'unknown' then coalesce(c.first_unknown_at, v_now) end,
           state = case p_what when 'done' then 'done' when 'skipped' then 'pending'
                               else case p_effect when 'unknown' then 'in_doubt' else 'failed' end end,
           effect = case p_what when 'done' then 'applied' when 'skipped' then 'not_applied' else p_effect end,
           failure_class = case p_what when 'failed' then p_class end,
           result = case when p_what = 'done' and r.store_result = 'all' then p_result end,
           result_digest = case when p_what = 'done' and r.store_result <> 'none' then sha256(p_result) end,
           result_missing = case when p_what = 'done' then p_missing end
     where c.record_id = r.id and c.generation = r.generation and c.name = 'body' and ends;
    update runguard.record k set lease_until = null, hold_until = null, handed_over = false, open_calls = 0,
           no_later_than = null, resume_at = null, claims = 0, error = coalesce(p_error, ''), evidence = '',
           state = case p_what when 'done' then 'done' when 'skipped' then 'pending'
                               else case p_effect when 'unknown' then 'in_doubt' else 'failed' end end,
           effect = case p_what when 'done' then 'applied' when 'skipped' then null else p_effect end,
           failure_class = case p_what when 'failed' then p_class end,
           needs_person = (p_what = 'failed' and p_effect = 'unknown'),
           first_unknown_at = case when p_what = 'failed' and p_effect = 'unknown' then coalesce(k.first_unknown_at, v_now) end,
           completeness = case p_what when 'done' then 'full' else 'none' end,
           finished_at = case p_what when 'done' then v_now end,
           result = case when p_what = 'done' and k.store_result = 'all' then p_result end,
           result_digest = case when p_what = 'done' and k.store_result <> 'none' then sha256(p_result) end,
           result_missing = case when p_what = 'done' then p_missing end
     where k.id = r.id and ends;
    perform runguard.book(r, case verdict when 'booked' then 'observed_' || p_what else 'observed_again' end, p_actor,
                          coalesce(said, p_error, ''), json_build_object('what', p_what, 'verdict', verdict, 'run_id', p_run_id,
                              'try', p_try_number, 'result', encode(sha256(p_result), 'hex'))::text, p_nonce);
end $$;

-- What Airflow was told about a task by a person, kept beside the truth that the ledger has. Once for each word of each
-- attempt, and only where there is a record. Answers the record's state, null = there is none.
create or replace function runguard.airflow_was_told(
    p_deployment text, p_namespace text, p_key text, p_ti_id text, p_word text, p_actor text, p_detail text
) returns text language plpgsql as $$
declare
    r runguard.record;
    v_mark text := 'told:' || p_ti_id || ':' || p_word;
begin
    perform runguard.pin();
    select * into r from runguard.record k
     where k.deployment = p_deployment and k.namespace = p_namespace and k.key = p_key;
    if found and not exists (select from runguard.event e where e.record_id = r.id and e.mark = v_mark) then
        perform runguard.open_for_writing();
        perform runguard.book(r, 'airflow_was_told', p_actor, p_word, p_detail, v_mark);
    end if;
    return r.state;
end $$;
