-- Who retried or removed dead letters of the consumer, which are on the broker: a row is there before anything is
-- changed, and how many were changed is known afterwards. null: the command did not come to its end.
create table dead_changes (
    id         bigint generated always as identity primary key,
    at         timestamptz not null default now(),
    action     text not null,
    count      integer,
    changed_by text not null,
    reason     text not null,
    chosen     text not null
);
