-- One row for each message that a consumer has processed. Whole seconds suffice for pruning, and the
-- index by time has one key for the entries of a second.
CREATE TABLE {{table}} (
    consumer     text           NOT NULL,
    message_id   uuid           NOT NULL,
    processed_at timestamptz(0) NOT NULL DEFAULT now(),
    PRIMARY KEY (consumer, message_id)
);

-- For pruning, oldest first.
CREATE INDEX "{{raw.table}}_processed_at_idx" ON {{table}} (consumer, processed_at);

-- What became of messages that did not go through at their first delivery: the newest
-- attempt that is known of, when it is due, and how many runs of the message the process has not survived.
CREATE TABLE {{attempts}} (
    consumer   text        NOT NULL,
    message_id uuid        NOT NULL,
    replays    integer     NOT NULL,
    attempt    integer     NOT NULL,
    open       integer     NOT NULL,
    name       text        NOT NULL DEFAULT '',
    due_at     timestamptz NOT NULL DEFAULT now(),
    updated_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (consumer, message_id)
);

-- A row pauses a consumer.
CREATE TABLE {{pause}} (
    part   text        NOT NULL,
    actor  text        NOT NULL,
    reason text        NOT NULL,
    since  timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (part)
);
