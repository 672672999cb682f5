-- What vendors say: the name of what a call set going, and where their book and ours differ.

-- p_submitted: a later holder may attach to it by this name; otherwise it is only something to look up by. Answers 'ok',
-- or 'lost' where the call is no longer this holder's; the name is kept as evidence all the same.
create or replace function runguard.remember(
    p_record_id bigint, p_generation integer, p_fence bigint, p_actor text, p_call text, p_external_id text,
    p_submitted boolean
) returns text language plpgsql as $$
declare
    r     runguard.record;
    c     runguard.call;
    v_own boolean;
begin
    perform runguard.pin();
    perform runguard.open_for_writing();
    select * into r from runguard.record k where k.id = p_record_id for update;
    if not found then
        return 'lost';
    end if;
    select * into c from runguard.call k
     where k.record_id = r.id and k.generation = p_generation and k.name = p_call;
    v_own := coalesce(r.generation = p_generation and c.fence = p_fence and c.state in ('started', 'in_doubt')
                      and runguard.broken(r) = '', false);
    if v_own and c.external_id = p_external_id and c.submitted = p_submitted then
        return 'ok';                            -- kept before; its answer was lost
    end if;
    if v_own then
        update runguard.call k set external_id = p_external_id, submitted = p_submitted
         where k.record_id = r.id and k.generation = p_generation and k.name = p_call;
    end if;
    perform runguard.book(r, 'remembered', p_actor, '', json_build_object('call', p_call, 'external_id', p_external_id,
        'before', c.external_id, 'submitted', p_submitted, 'fence', p_fence, 'late', not v_own)::text);
    return case when v_own then 'ok' else 'lost' end;
end $$;

-- A look-up found the job of a doubtful call: from now on the call is a submitted one, and a later holder attaches to it.
create or replace function runguard.adopt(
    p_record_id bigint, p_seen_fence bigint, p_call text, p_external_id text, p_actor text
) returns text language plpgsql as $$
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
    update runguard.call c set external_id = p_external_id, submitted = true
     where c.record_id = r.id and c.generation = r.generation and c.name = p_call and c.state = 'in_doubt';
    if not found then
        return 'no_such_call';
    end if;
    perform runguard.book(r, 'remembered', p_actor, '', json_build_object('call', p_call, 'external_id', p_external_id,
        'submitted', true, 'adopted', true)::text);
    return 'ok';
end $$;

-- A difference between the ledger and what the vendor lists. Booked once; says whether it is new. p_record_id = null: an
-- effect without a line.
create or replace function runguard.note_difference(
    p_record_id bigint, p_generation integer, p_kind text, p_actor text, p_reason text, p_detail text
) returns boolean language plpgsql as $$
begin
    perform runguard.pin();
    perform runguard.open_for_writing();
    if exists (select from runguard.event e where e.record_id is not distinct from p_record_id and e.kind = p_kind
                  and e.generation is not distinct from p_generation and e.detail = p_detail) then
        return false;
    end if;
    insert into runguard.event (record_id, generation, kind, actor, reason, detail)
    values (p_record_id, p_generation, p_kind, p_actor, p_reason, p_detail);
    return true;
end $$;
