CREATE TABLE {{table}} (
    key                 text        PRIMARY KEY,
    fingerprint         text        NOT NULL,
    fingerprint_version integer     NOT NULL,
    status              text        NOT NULL CHECK (status IN ('processing', 'completed')),
    code                integer     NOT NULL DEFAULT 0,
    headers             text        NOT NULL DEFAULT '{}',
    body                bytea,
    token               text        NOT NULL,
    lease_until         timestamptz,
    created_at          timestamptz NOT NULL DEFAULT clock_timestamp(),
    expires_at          timestamptz NOT NULL,
    CHECK ((status = 'processing') = (lease_until IS NOT NULL))
);

CREATE INDEX "{{raw.table}}_expires_idx" ON {{table}} (expires_at);

COMMENT ON COLUMN {{table}}.code IS 'HTTP status; 0: the work was done, its response was not kept';
COMMENT ON COLUMN {{table}}.lease_until IS 'end of the claim while processing';
