package inboxpgx

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/chunk"
)

const (
	defaultRetention = 8 * 24 * time.Hour
	defaultChunkSize = 5000
)

// PruneConfig configures Prune. The zero value is usable.
type PruneConfig struct {
	// Schema and Table say where the entries are, as in SchemaConfig.
	Schema, Table string
	// Retention is how long entries are kept. It must be longer than any copy of a message
	// may come later than the first: retries, time in the queue and in the dead-letter
	// queue together. 0 means 8 days.
	Retention time.Duration
	// ChunkSize is how many entries one statement deletes; 0 means 5000.
	ChunkSize int
}

func (c PruneConfig) withDefaults() PruneConfig {
	if c.Retention == 0 {
		c.Retention = defaultRetention
	}
	if c.ChunkSize == 0 {
		c.ChunkSize = defaultChunkSize
	}
	return c
}

func (c PruneConfig) validate() error {
	var problems []error
	if c.Retention < 0 {
		problems = append(problems, fmt.Errorf("inboxpgx: PruneConfig.Retention %v is negative", c.Retention))
	}
	if c.ChunkSize < 0 {
		problems = append(problems, fmt.Errorf("inboxpgx: PruneConfig.ChunkSize %d is negative", c.ChunkSize))
	}
	return errors.Join(problems...)
}

// Prune deletes the entries of all consumers that are older than the retention on the
// database's clock, in chunks, each in a transaction of its own, and returns how many. What
// the Ledger has not looked at for as long goes, too, and is not counted. It may run in
// several processes at once, and beside consumers. After an error or the end of ctx the
// chunks deleted so far stay deleted.
func Prune(ctx context.Context, pool *pgxpool.Pool, cfg PruneConfig) (int64, error) {
	cfg = cfg.withDefaults()
	schema := SchemaConfig{Schema: cfg.Schema, Table: cfg.Table}
	name, err := schema.qualified()
	attempts, err2 := schema.attempts()
	if err := errors.Join(err, err2, cfg.validate()); err != nil {
		return 0, err
	}
	// Tuple ids are safe here: the rows are locked when they are read.
	older := func(name, column string) string {
		return `DELETE FROM ` + name + ` WHERE ctid = ANY(ARRAY(SELECT ctid FROM ` + name + `
			WHERE ` + column + ` < now() - $1::interval ORDER BY ` + column + ` LIMIT $2 FOR UPDATE SKIP LOCKED))`
	}
	n, err := chunk.Delete(ctx, pool, cfg.ChunkSize, older(name, "processed_at"), cfg.Retention)
	if err == nil { // the ledger's table is small, and needs no index for this
		_, err = chunk.Delete(ctx, pool, cfg.ChunkSize, older(attempts, "updated_at"), cfg.Retention)
	}
	if err != nil {
		return n, fmt.Errorf("inboxpgx: prune: %w", schema.missing().Explain(err))
	}
	return n, nil
}
