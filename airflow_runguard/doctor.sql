-- What the server says of itself, in one look. Needs no runguard schema and no rights but to connect.
select clock_timestamp() as now,
       pg_backend_pid() as pid,
       pg_is_in_recovery() as standby,
       current_setting('default_transaction_read_only') as read_only,
       current_setting('default_transaction_isolation') as isolation,
       current_setting('synchronous_commit') as synchronous_commit,
       current_setting('fsync') as fsync,
       current_setting('full_page_writes') as full_page_writes,
       current_setting('server_version') as version,
       current_setting('server_version_num')::int as version_number,
       current_setting('max_connections')::int as max_connections,
       current_setting('superuser_reserved_connections')::int
           + coalesce(current_setting('reserved_connections', true), '0')::int as reserved,
       (select coalesce(sum(numbackends), 0)::int from pg_stat_database) as in_use
