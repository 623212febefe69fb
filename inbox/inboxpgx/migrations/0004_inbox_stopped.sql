-- One row for each ordering key that is stopped by a dead letter, or that has messages left from then. It is locked
-- FOR NO KEY UPDATE while a message of the key runs. Next_at is when the first one may run: infinity while that is a
-- dead letter, which stopped the key at since. Each claim of the key changes next_at, and what a former claim does later
-- has no effect.
CREATE TABLE {{stopped}} (
    consumer text        NOT NULL,
    key      text        NOT NULL COLLATE "C",
    since    timestamptz NOT NULL DEFAULT now(),
    next_at  timestamptz NOT NULL DEFAULT 'infinity',
    PRIMARY KEY (consumer, key)
);

CREATE INDEX "{{raw.stopped}}_next_at_idx" ON {{stopped}} (consumer, next_at);

-- The messages of these keys, in the order of seq. Only the first of a key may be a dead letter, which has a class.
-- Envelope is JSON, all but the body. Runs counts the runs that the process may not have survived. The foreign key
-- keeps a key stopped while it has messages: a new message locks the row of its key FOR KEY SHARE.
CREATE TABLE {{waiting}} (
    consumer   text        NOT NULL,
    key        text        NOT NULL COLLATE "C",
    seq        bigint      NOT NULL GENERATED ALWAYS AS IDENTITY,
    message_id uuid        NOT NULL,
    runs       integer     NOT NULL DEFAULT 0,
    class      text        COLLATE "C",
    failed_at  timestamptz,
    envelope   bytea       NOT NULL,
    body       bytea       NOT NULL,
    stored_at  timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (consumer, message_id),
    FOREIGN KEY (consumer, key) REFERENCES {{stopped}} (consumer, key)
);

CREATE INDEX "{{raw.waiting}}_key_idx" ON {{waiting}} (consumer, key, seq);

CREATE INDEX "{{raw.waiting}}_class_idx" ON {{waiting}} (consumer, class, seq) WHERE class IS NOT NULL;
