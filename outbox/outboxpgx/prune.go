package outboxpgx

import (
	"context"
	"time"

	"github.com/holdfast-go/holdfast/internal/pgprune"
)

// due are the rows that are pruned: the keys of WriteOnce that have run out, what operators did long ago,
// and messages that were published. These also without a Retention: rows may remain of a time with one.
func (t tables) due(retention time.Duration) []pgprune.Statement {
	const published = `published_at IS NOT NULL AND published_at < now() - $1 * interval '1 microsecond' ORDER BY published_at`
	return []pgprune.Statement{
		{Table: t.dedup, ID: "key", Due: `expires_at <= now() ORDER BY expires_at`},
		{Table: t.audit, ID: "id", Due: `at < now() - $1 * interval '1 microsecond' ORDER BY at`, Args: []any{auditRetention.Microseconds()}},
		{Table: t.outbox, ID: "id", Due: published, Args: []any{retention.Microseconds()}},
	}
}

func (s *Store) newPruner() (*pgprune.Pruner, error) {
	return pgprune.New(pgprune.Config{
		Pool: s.pool, Table: s.t.outbox, Core: "outbox", Statements: s.t.due(s.cfg.Retention), Interval: s.cfg.PruneInterval,
		Explain: s.t.explain, Logger: s.cfg.Logger,
	})
}

// Prune deletes published messages older than Config.Retention (all of them where it is 0), the keys of WriteOnce that have run
// out, and what is older than a year of Audit, and returns how many rows that was, also with an error.
// A relay on the Store does it by itself every Config.PruneInterval. It works in small transactions
// and may be cut short by ctx at any time.
func (s *Store) Prune(ctx context.Context) (int, error) { return s.pruner.Prune(ctx) }

// Prunable returns how many rows Prune would delete by now. Of each kind it counts 100,000 at most: that
// means as many or more.
func (s *Store) Prunable(ctx context.Context) (int, error) { return s.pruner.Count(ctx) }

// PrunePass implements driver.Pruner: it does nothing where Config.PruneInterval is negative.
func (s *Store) PrunePass(ctx context.Context) { s.pruner.Pass(ctx) }
