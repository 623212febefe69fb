-- Ordering keys that wait: the dead letter that has stopped a key, which alone has a class, and the
-- messages of the key behind it, in the order of seq. Envelope is JSON, all but the body. The first
-- message of a key that goes on is claimed by the run of a consumer that processes it.
CREATE TABLE {{parked}} (
    consumer   text        NOT NULL,
    key        text        NOT NULL,
    seq        bigint      NOT NULL GENERATED ALWAYS AS IDENTITY,
    message_id uuid        NOT NULL,
    replays    integer     NOT NULL,
    class      text,
    failed_at  timestamptz,
    stopped_at timestamptz,
    name       text        NOT NULL,
    envelope   bytea       NOT NULL,
    body       bytea       NOT NULL,
    parked_at  timestamptz NOT NULL DEFAULT now(),
    claimed_by    uuid,
    claimed_until timestamptz,
    PRIMARY KEY (consumer, message_id)
);

CREATE INDEX "{{raw.parked}}_key_idx" ON {{parked}} (consumer, key COLLATE "C", seq);

CREATE INDEX "{{raw.parked}}_class_idx" ON {{parked}} (consumer, class COLLATE "C", seq) WHERE class IS NOT NULL;
