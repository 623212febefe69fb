package outboxpgx

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/pgcall"
	"github.com/holdfast-go/holdfast/outbox/driver"
)

// SourceConfig tunes a Source. The zero value works.
type SourceConfig struct {
	// Schema and Table are as in SchemaConfig.
	Schema, Table string
	// LanesPerClaim is how many of the driver.Lanes lanes one claim takes at most. Fewer leave more
	// to other relays, more fill a batch better. Default 4.
	LanesPerClaim int
	// MaxBatchBytes bounds the bodies of one batch; its first message is always taken. Default
	// 32 MiB.
	MaxBatchBytes int64
	// Retention keeps published messages, with published_at, until Prune finds them older than
	// this. 0 means that they are deleted as soon as they are confirmed.
	Retention time.Duration
}

// Source is the driver.Source of the table. It is safe for concurrent use, by any number of relays
// in any number of processes. It works behind a pooler in transaction mode.
type Source struct {
	pool *pgxpool.Pool
	cfg  SourceConfig
	t    tables
	sql  statements

	horizon horizon
	alarm   alarm
	lost    lostClaims
}

// callTimeout bounds calls whose context has no deadline. Those of a relay have its StoreTimeout.
const callTimeout = 30 * time.Second

// use runs fn on a connection.
func (s *Source) use(ctx context.Context, fn func(context.Context, *pgxpool.Conn) error) error {
	if _, ok := ctx.Deadline(); !ok {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, callTimeout)
		defer cancel()
	}
	return pgcall.Use(ctx, s.pool, fn)
}

// send runs a batch in one round trip.
func (s *Source) send(ctx context.Context, queue *pgx.Batch) error {
	return s.use(ctx, func(ctx context.Context, conn *pgxpool.Conn) error { return conn.SendBatch(ctx, queue).Close() })
}

// NewSource returns a Source. The pool needs two connections per relay.
func NewSource(pool *pgxpool.Pool, cfg SourceConfig) (*Source, error) {
	if cfg.LanesPerClaim == 0 {
		cfg.LanesPerClaim = 4
	}
	if cfg.MaxBatchBytes == 0 {
		cfg.MaxBatchBytes = 32 << 20
	}
	t, err := SchemaConfig{cfg.Schema, cfg.Table}.tables()
	errs := []error{err}
	if pool == nil {
		errs = append(errs, errors.New("outboxpgx: NewSource needs a pool"))
	}
	if cfg.LanesPerClaim < 0 || cfg.LanesPerClaim > driver.Lanes {
		errs = append(errs, fmt.Errorf("outboxpgx: SourceConfig.LanesPerClaim is %d, want 1 to %d", cfg.LanesPerClaim, driver.Lanes))
	}
	if cfg.MaxBatchBytes < 0 {
		errs = append(errs, fmt.Errorf("outboxpgx: SourceConfig.MaxBatchBytes is %d, want more than 0", cfg.MaxBatchBytes))
	}
	if cfg.Retention < 0 {
		errs = append(errs, fmt.Errorf("outboxpgx: SourceConfig.Retention is %v, want 0 or more", cfg.Retention))
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	return &Source{pool: pool, cfg: cfg, t: t, sql: t.statements()}, nil
}
