package inboxpgx

import (
	"context"
	"math"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/pgprune"
)

// rounding is how much later than its stored time an entry may have been made.
const rounding = 500 * time.Millisecond

// newPruner deletes the consumer's entries that are older than the retention on the database's
// clock, but for those of messages that are parked, and what its ledger has not noted anything of for as long.
func newPruner(pool *pgxpool.Pool, names tables, consumer string, cfg Config) (*pgprune.Pruner, error) {
	// Tuple ids are safe here: the rows are locked when they are read.
	older := func(table, column string, than time.Duration, unless string) pgprune.Statement {
		due := `consumer = $1 AND ` + column + ` < now() - $2::interval` + unless
		return pgprune.Statement{Table: table, ID: "ctid", Also: due, Due: due + ` ORDER BY ` + column, Args: []any{consumer, than}}
	}
	return pgprune.New(pgprune.Config{
		Pool: pool, Table: names.entries, Core: "inbox",
		// The ledger's table is small, and needs no index for this.
		Statements: []pgprune.Statement{
			older(names.entries, "processed_at", later(cfg.Retention, rounding), andNotParked(names, names.entries)),
			older(names.attempts, "updated_at", cfg.Retention, ""),
		},
		Interval: cfg.PruneInterval,
		Explain:  names.missing().Explain,
		Logger:   cfg.Logger, MeterProvider: cfg.MeterProvider,
	})
}

// andNotParked excepts the entries of messages that wait: the copy of one that has taken effect may be parked
// behind a dead letter for longer than the retention, and must be known when its turn comes.
func andNotParked(names tables, entry string) string {
	return ` AND NOT EXISTS (SELECT FROM ` + names.waiting + ` w WHERE w.consumer = ` + entry + `.consumer AND w.message_id = ` + entry + `.message_id)`
}

// Background implements driver.Background of inbox: while a consumer runs it prunes every Config.PruneInterval, and
// processes the messages of stopped keys that may go on.
func (s *Store) Background(ctx context.Context) {
	var all sync.WaitGroup
	if s.pruner != nil {
		all.Go(func() { s.pruner.Run(ctx) })
	}
	all.Go(func() { s.drain(ctx) })
	all.Wait()
}

// later is the sum, of a retention without end too.
func later(retention, by time.Duration) time.Duration {
	return retention + min(by, math.MaxInt64-retention)
}

// Prune deletes the entries of this consumer that are older than Config.Retention on the
// database's clock, and what its ledger has noted nothing of for as long, in small transactions.
// The entry of a message that is parked (inbox.ConsumerConfig.ParkKeys) stays for as long as that waits.
// It returns how many rows that were, also with an error. It may run in several processes at
// once, and beside consumers. With Config.Entries there is nothing to do.
func (s *Store) Prune(ctx context.Context) (int, error) {
	if s.pruner == nil {
		return 0, nil
	}
	return s.pruner.Prune(ctx)
}

// Prunable returns how many rows Prune would delete by now. Of each kind it counts 100,000 at most: that
// means as many or more.
func (s *Store) Prunable(ctx context.Context) (int, error) {
	if s.pruner == nil {
		return 0, nil
	}
	return s.pruner.Count(ctx)
}
