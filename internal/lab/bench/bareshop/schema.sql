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
