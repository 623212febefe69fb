-- The table of messages. seq is the stored order; a row is ready while published_at and due_at are null,
-- and waits for its first or next attempt until due_at. A held row waits for the previous row of its key;
-- its due_at is a safety net, or the time at which it follows. Rows are short-lived, so they are vacuumed early.
-- The server parses and plans a check for each INSERT, so the check has only limits that a relay cannot enforce: relays
-- read 16 lanes, and a longer ordering key would not fit into an index when the message waits.
CREATE TABLE {{table}} (
    id             uuid        NOT NULL,
    seq            bigint      GENERATED ALWAYS AS IDENTITY,
    lane           smallint    NOT NULL,
    name           text        NOT NULL,
    body           bytea       NOT NULL,
    content_type   text        NOT NULL,
    headers        jsonb,
    ordering_key   text,
    transport_name text        NOT NULL DEFAULT '',
    exchange       text        NOT NULL DEFAULT '',
    routing_key    text        NOT NULL DEFAULT '',
    route_headers  jsonb,
    created_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    published_at   timestamptz,
    due_at         timestamptz,
    held           boolean     NOT NULL DEFAULT false,
    attempts       integer     NOT NULL DEFAULT 0,
    error_class    text,
    last_error     text,
    CONSTRAINT "{{raw.table}}_pkey" PRIMARY KEY (id),
    CONSTRAINT "{{raw.table}}_limits" CHECK (lane BETWEEN 0 AND 15 AND octet_length(ordering_key) <= 255)
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 500, autovacuum_vacuum_cost_delay = 0);

CREATE INDEX "{{raw.table}}_ready" ON {{table}} (lane, seq) WHERE published_at IS NULL AND due_at IS NULL;
CREATE INDEX "{{raw.table}}_parked" ON {{table}} (due_at) WHERE published_at IS NULL AND due_at IS NOT NULL;
CREATE INDEX "{{raw.table}}_held" ON {{table}} (ordering_key, seq) WHERE published_at IS NULL AND due_at IS NOT NULL;
CREATE INDEX "{{raw.table}}_published" ON {{table}} (published_at) WHERE published_at IS NOT NULL;

-- One row per lane: the fencing token and the end of its lease, and the seq below which the lane has no ready row, so that
-- index entries of deleted rows are not read again. A token after the end of its lease belongs to a lost claim. The lane is
-- then suspect up to a seq, and batch limits the rows of its claims. alone is the seq of the last row that was claimed
-- alone, and losses is how many such claims were lost in a row. era is the time at which rows were found below a floor:
-- the order of earlier sequence numbers is unknown.
CREATE TABLE {{lanes}} (
    lane        smallint    NOT NULL,
    token       bigint,
    lease_until timestamptz NOT NULL DEFAULT '-infinity',
    floor       bigint      NOT NULL DEFAULT 0,
    batch       integer     NOT NULL DEFAULT 0,
    suspect     bigint,
    alone       bigint,
    losses      integer     NOT NULL DEFAULT 0,
    era         bigint      NOT NULL DEFAULT 0,
    CONSTRAINT "{{raw.lanes}}_pkey" PRIMARY KEY (lane)
) WITH (fillfactor = 20, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200, autovacuum_vacuum_cost_delay = 0);

INSERT INTO {{lanes}} (lane) SELECT generate_series(0, 15);

-- Messages that were given up. seq is their stored order. The fingerprint is the same for failures of one kind: it
-- ignores quotations and digits in the error.
CREATE TABLE {{dead}} (
    id             uuid        NOT NULL,
    seq            bigint      NOT NULL,
    lane           smallint    NOT NULL,
    name           text        NOT NULL,
    body           bytea       NOT NULL,
    content_type   text        NOT NULL,
    headers        jsonb,
    ordering_key   text,
    transport_name text        NOT NULL,
    exchange       text        NOT NULL,
    routing_key    text        NOT NULL,
    route_headers  jsonb,
    created_at     timestamptz NOT NULL,
    attempts       integer     NOT NULL,
    error_class    text        NOT NULL,
    last_error     text        NOT NULL,
    died_at        timestamptz NOT NULL DEFAULT clock_timestamp(),
    fingerprint    text        GENERATED ALWAYS AS (lpad(to_hex(hashtextextended(error_class || E'\n' || transport_name || E'\n' || name || E'\n' ||
        regexp_replace(left(last_error, 1000), '"[^"]*"|''[^'']*''|`[^`]*`|\S*[0-9]\S*', '#', 'g'), 0)), 16, '0')) STORED,
    CONSTRAINT "{{raw.dead}}_pkey" PRIMARY KEY (id)
);

CREATE INDEX "{{raw.dead}}_died" ON {{dead}} (died_at, seq);

-- The changes of dead letters: the author, the reason and the selection.
CREATE TABLE {{audit}} (
    id          bigint      GENERATED ALWAYS AS IDENTITY,
    at          timestamptz NOT NULL DEFAULT clock_timestamp(),
    actor       text        NOT NULL,
    reason      text        NOT NULL,
    action      text        NOT NULL,
    count       bigint      NOT NULL,
    filter      jsonb       NOT NULL,
    CONSTRAINT "{{raw.audit}}_pkey" PRIMARY KEY (id)
);

CREATE INDEX "{{raw.audit}}_at" ON {{audit}} (at);

-- A row pauses all relays.
CREATE TABLE {{pause}} (
    part   text        NOT NULL,
    actor  text        NOT NULL,
    reason text        NOT NULL,
    since  timestamptz NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT "{{raw.pause}}_pkey" PRIMARY KEY (part)
);

-- The keys of messages that may be written once, until they run out.
CREATE TABLE {{dedup}} (
    key        text        NOT NULL,
    id         uuid        NOT NULL,
    expires_at timestamptz NOT NULL,
    CONSTRAINT "{{raw.dedup}}_pkey" PRIMARY KEY (key),
    CONSTRAINT "{{raw.dedup}}_sizes" CHECK (octet_length(key) BETWEEN 1 AND 255)
);

CREATE INDEX "{{raw.dedup}}_expires" ON {{dedup}} (expires_at);

-- Fails. A statement calls it if it has changed fewer rows than it should: a trigger, a rule or row-level security drops
-- changes without an error.
CREATE FUNCTION {{ignored}}(name text, dropped bigint) RETURNS integer LANGUAGE plpgsql AS $ignored$
BEGIN
    RAISE EXCEPTION 'table % ignored the change of % rows', name, dropped USING ERRCODE = 'HF001';
END
$ignored$;
