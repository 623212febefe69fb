-- No foreign keys: events are never deleted, every use case reads the event it
-- writes for, and the key checks would lock the event's row in each hold.

create table events (
    id         uuid primary key,
    name       text        not null,
    seats      integer     not null check (seats between 1 and 10000),
    created_at timestamptz not null default now()
);

-- Half-filled pages and no index on what changes keep every update of a seat on
-- its page (HOT): the primary key is then never written after the event was
-- created, and holds of different seats do not meet in an index page.
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

-- What the sweeper asks for.
create index reservations_due_idx on reservations (expires_at, id) where status = 'held';

-- The consumer's read model: the last that was heard of each reservation, and in
-- how many messages: each of them counts once, however often the broker delivers it.
create table reservation_states (
    reservation_id uuid primary key,
    event_id       uuid     not null,
    status         text     not null,
    rank           smallint not null,
    messages       integer  not null
);

create index reservation_states_event_idx on reservation_states (event_id);
