-- One row for each message that a consumer has processed.
CREATE TABLE {{table}} (
    consumer     text        NOT NULL,
    message_id   uuid        NOT NULL,
    processed_at timestamptz NOT NULL DEFAULT now(),
    name         text        NOT NULL DEFAULT '',
    PRIMARY KEY (consumer, message_id)
);

-- For pruning, oldest first.
CREATE INDEX "{{raw.table}}_processed_at_idx" ON {{table}} (processed_at);
