package outboxpgx

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/pgcall"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
)

// auditRetention is for how long it is known who changed dead letters.
const auditRetention = 365 * 24 * time.Hour

// The actions as they are stored.
const (
	actionRetry  = "retry"
	actionRemove = "remove"
)

// AuditEntry is one call of DeadLetters.Retry or Remove that changed something.
type AuditEntry struct {
	// At is by the database's clock.
	At time.Time
	// By and Reason are as the caller gave them.
	By, Reason string
	// Action is "retry" or "remove".
	Action string
	// Count is how many dead letters it changed, and Filter what chose them.
	Count  int64
	Filter Filter
	// To is where a retry sent them instead of where they were going; nil: nowhere else.
	To *Destination
	// Unreadable is why Filter or To are missing: the entry was written by hand. Nil: they are there.
	Unreadable error
}

// Audit returns the newest entries, the newest first; limit 0 means 100. An entry is written in the
// transaction of the change, and kept for a year: Store.Prune deletes the older ones.
func (s *Store) Audit(ctx context.Context, limit int) ([]AuditEntry, error) {
	if limit < 0 {
		return nil, fmt.Errorf("outboxpgx: audit: the limit is %d, want 0 or more", limit)
	}
	if limit == 0 {
		limit = listLimit
	}
	var entries []AuditEntry
	err := pgcall.Twice(ctx, s.pool, s.dead.readTimeout, func(ctx context.Context, conn *pgxpool.Conn) (err error) {
		rows, _ := conn.Query(ctx, s.dead.sql.audit, limit) // CollectRows returns its error
		entries, err = pgx.CollectRows(rows, scanAudit)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("outboxpgx: audit: %w", s.t.explain(err))
	}
	return entries, nil
}

func scanAudit(row pgx.CollectableRow) (AuditEntry, error) {
	var e AuditEntry
	var chosenBy, elsewhere []byte
	if err := row.Scan(&e.At, &e.By, &e.Reason, &e.Action, &e.Count, &chosenBy, &elsewhere); err != nil {
		return e, err
	}
	var filter storedFilter
	if err := json.Unmarshal(chosenBy, &filter); err != nil {
		e.Unreadable = fmt.Errorf("filter: %w", err)
		return e, nil
	}
	e.Filter = filter.filter()
	if elsewhere == nil {
		return e, nil
	}
	var to storedDestination
	if err := json.Unmarshal(elsewhere, &to); err != nil {
		e.Unreadable = fmt.Errorf("destination: %w", err)
		return e, nil
	}
	e.To = &Destination{to.Transport, outbox.Route{Exchange: to.Exchange, RoutingKey: to.RoutingKey, Headers: to.Headers}}
	return e, nil
}

// storedFilter is a Filter as the table holds it, without what is not set.
type storedFilter struct {
	IDs       []uuid.UUID  `json:"ids,omitempty"`
	Class     driver.Class `json:"class,omitempty"`
	Name      string       `json:"name,omitempty"`
	Key       string       `json:"key,omitempty"`
	Error     string       `json:"error,omitempty"`
	OlderThan int64        `json:"older_than_us,omitempty"`
	Limit     int          `json:"limit,omitempty"`
}

// storedDestination is what deadRetrySQL makes of a Destination.
type storedDestination struct {
	Transport  string            `json:"transport"`
	Exchange   string            `json:"exchange"`
	RoutingKey string            `json:"routing_key"`
	Headers    map[string]string `json:"headers"`
}

func (f Filter) encode() (string, error) {
	b, err := json.Marshal(storedFilter{f.IDs, f.Class, f.Name, f.Key, f.Error, f.OlderThan.Microseconds(), f.Limit})
	if err != nil {
		return "", fmt.Errorf("outboxpgx: encode the filter: %w", err)
	}
	return string(b), nil
}

func (s storedFilter) filter() Filter {
	return Filter{
		IDs: s.IDs, Class: s.Class, Name: s.Name, Key: s.Key, Error: s.Error,
		OlderThan: time.Duration(s.OlderThan) * time.Microsecond, Limit: s.Limit,
	}
}
