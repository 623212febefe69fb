-- The tables of examples/reservation that a hold reads and writes, with the same indexes and fill factor.

create table events (
    id         uuid primary key,
    name       text        not null,
    seats      integer     not null,
    created_at timestamptz not null default now()
);

create table seats (
    event_id       uuid    not null,
    number         integer not null,
    state          text    not null default 'free' check (state in ('free', 'held', 'confirmed')),
    reservation_id uuid,
    held_until     timestamptz,
    primary key (event_id, number),
    check ((state = 'free') = (reservation_id is null)),
    check ((state = 'held') = (held_until is not null))
) with (fillfactor = 50);

create table reservations (
    id         uuid primary key,
    event_id   uuid        not null,
    user_id    text        not null,
    seats      integer[]   not null,
    status     text        not null check (status in ('held', 'confirmed', 'cancelled', 'expired')),
    expires_at timestamptz not null,
    created_at timestamptz not null default now()
);

create index reservations_due_idx on reservations (expires_at, id) where status = 'held';

-- Only with -guarded: keys with their answers, limits and an outbox, as written by hand.

create table keys (
    key         text primary key,
    fingerprint bytea       not null,
    status      integer,
    answer      bytea,
    created_at  timestamptz not null default now(),
    expires_at  timestamptz not null
);

create index keys_expires_idx on keys (expires_at);

create table limits (
    user_id text primary key,
    minute  timestamptz not null,
    used    bigint      not null
);

create table messages (
    id         bigint generated always as identity primary key,
    name       text        not null,
    key        text        not null,
    headers    jsonb       not null,
    payload    bytea       not null,
    created_at timestamptz not null default now()
);
