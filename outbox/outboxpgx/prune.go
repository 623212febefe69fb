package outboxpgx

import (
	"context"

	"github.com/holdfast-go/holdfast/internal/pgprune"
)

const pruneSQL = `
DELETE FROM {outbox} WHERE id = ANY(ARRAY(
  SELECT id FROM {outbox} WHERE published_at IS NOT NULL AND published_at < now() - $1 * interval '1 microsecond'
  ORDER BY published_at LIMIT $2 FOR UPDATE SKIP LOCKED))`

func (s *Store) newPruner() (*pgprune.Pruner, error) {
	statements := []pgprune.Statement{
		{SQL: s.sql.forget},
		{SQL: s.t.fill(auditPruneSQL), Args: []any{auditRetention.Microseconds()}},
		// Also without a Retention: rows may remain of a time with one.
		{SQL: s.t.fill(pruneSQL), Args: []any{s.cfg.Retention.Microseconds()}},
	}
	return pgprune.New(pgprune.Config{
		Pool: s.pool, Table: s.t.outbox, Core: "outbox", Statements: statements, Interval: s.cfg.PruneInterval,
		Explain: s.t.explain, Logger: s.cfg.Logger,
	})
}

// Prune deletes published messages older than Config.Retention (all of them where it is 0), the keys of WriteOnce that have run
// out, and what is older than a year of Audit, and returns how many rows that was, also with an error.
// A relay on the Store does it by itself every Config.PruneInterval. It works in small transactions
// and may be cut short by ctx at any time.
func (s *Store) Prune(ctx context.Context) (int, error) { return s.pruner.Prune(ctx) }

// PrunePass implements driver.Pruner: it does nothing where Config.PruneInterval is negative.
func (s *Store) PrunePass(ctx context.Context) { s.pruner.Pass(ctx) }
