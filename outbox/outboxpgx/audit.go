package outboxpgx

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/holdfast-go/holdfast/outbox"
)

// auditRetention is for how long it is known who changed dead letters.
const auditRetention = 365 * 24 * time.Hour

// auditLimit is how many entries an Audit without a limit returns.
const auditLimit = 100

// AuditEntry is one Replay or Remove of dead letters that changed something.
type AuditEntry struct {
	// At is by the database's clock.
	At time.Time
	// By and Reason are as the caller gave them.
	By, Reason string
	// Action is "replay", "edit" for a replay that replaced bodies, or "remove".
	Action string
	// Count is how many dead letters it changed.
	Count int
	// Filter is what selected them.
	Filter outbox.Filter
	// Unreadable is why Filter is missing: another program wrote the entry. Nil: it is there.
	Unreadable error
}

// Audit returns the newest entries, the newest first. A limit of 0 means 100. An entry is written in
// the transaction of the change's first step, counts the others in theirs, and is kept for a year.
func (s *Store) Audit(ctx context.Context, limit int) ([]AuditEntry, error) {
	if limit < 0 {
		return nil, fmt.Errorf("outboxpgx: audit: the limit is %d, want 0 or more", limit)
	}
	if limit == 0 {
		limit = auditLimit
	}
	return collect(ctx, s.dead, "audit", scanAudit, s.dead.sql.audit, limit)
}

func scanAudit(row pgx.CollectableRow) (AuditEntry, error) {
	var e AuditEntry
	var chosenBy []byte
	var at pgtype.Timestamptz // infinite, of another program: the zero time
	if err := row.Scan(&at, &e.By, &e.Reason, &e.Action, &e.Count, &chosenBy); err != nil {
		return e, err
	}
	e.At = at.Time
	var filter storedFilter
	if err := json.Unmarshal(chosenBy, &filter); err != nil {
		e.Unreadable = fmt.Errorf("filter: %w", err)
		return e, nil
	}
	e.Filter = outbox.Filter(filter)
	return e, nil
}

// storedFilter is a Filter as the table holds it, without what is not set.
type storedFilter struct {
	IDs           []uuid.UUID `json:"ids,omitempty"`
	Class         string      `json:"class,omitempty"`
	Name          string      `json:"name,omitempty"`
	Key           string      `json:"key,omitempty"`
	Fingerprint   string      `json:"fingerprint,omitempty"`
	ErrorContains string      `json:"error_contains,omitempty"`
	FailedAfter   time.Time   `json:"failed_after,omitzero"`
	FailedBefore  time.Time   `json:"failed_before,omitzero"`
	Limit         int         `json:"limit,omitempty"`
	After         string      `json:"-"` // no change has it
}

func encodeFilter(f outbox.Filter) (string, error) {
	b, err := json.Marshal(storedFilter(f))
	if err != nil {
		return "", fmt.Errorf("outboxpgx: encode the filter: %w", err)
	}
	return string(b), nil
}
