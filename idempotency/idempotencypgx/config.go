package idempotencypgx

import (
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/idempotency/driver"
	pgxdriver "github.com/holdfast-go/holdfast/idempotency/idempotencypgx/driver"
	"github.com/holdfast-go/holdfast/internal/sqlident"
	"github.com/holdfast-go/holdfast/txretry"
)

// Config configures a Store. The zero value is usable.
type Config struct {
	// Schema holds the table. Default: the search path decides.
	Schema string
	// Table is its name. Default: "holdfast_idempotency".
	Table string
	// Gate is the store in front, such as that of idempotencyredis: it keeps concurrent
	// requests apart and replays fast. Default: none, Postgres alone decides.
	Gate driver.Store
	// Lease is how long a claim lasts without renewal. With it claims are rows of the
	// table, which also protect handlers that answer without Do, at two statements more
	// for each request; at least 10 ms. Default: the transaction claims the key when it begins.
	// It must be 0 where there is a Gate, which has leases of its own.
	Lease time.Duration
	// Retention is how long a record lasts. With a Lease it counts from the claim, or, if the work
	// took longer than that, from a Lease before the answer. Default: 48 h.
	Retention time.Duration
	// PruneInterval is the time between two passes in which this process deletes records
	// that are older than Retention; the pass is started by a request that stores one.
	// Default: 1 minute. Negative: never, call Prune.
	PruneInterval time.Duration
	// Records are kept in place of the table; a Transactor without a pool needs them.
	// Default: the table, in the database of the Transactor.
	Records pgxdriver.Records
	// Logger. Default: slog.Default().
	Logger *slog.Logger
}

const (
	defaultTable     = "holdfast_idempotency"
	defaultRetention = 48 * time.Hour
)

func (c Config) withDefaults() Config {
	if c.Table == "" {
		c.Table = defaultTable
	}
	if c.Retention == 0 {
		c.Retention = defaultRetention
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	return c
}

// validate returns the table's name for SQL text.
func (c Config) validate(t txretry.Transactor, pool *pgxpool.Pool) (table string, err error) {
	var errs []error
	if t == nil {
		errs = append(errs, errors.New("idempotencypgx: transactor is nil"))
	}
	if t != nil && pool == nil && c.Records == nil {
		errs = append(errs, errors.New("idempotencypgx: the transactor has no pool, and Records is nil"))
	}
	if c.Lease != 0 && c.Lease < 10*time.Millisecond {
		errs = append(errs, errors.New("idempotencypgx: Lease must be at least 10ms"))
	}
	if c.Lease != 0 && c.Gate != nil {
		errs = append(errs, errors.New("idempotencypgx: Lease and Gate are both set: the gate has leases of its own"))
	}
	if c.Lease != 0 && c.Records != nil {
		errs = append(errs, errors.New("idempotencypgx: Lease and Records are both set: claims need the table"))
	}
	if c.Retention < c.Lease || c.Retention < 0 {
		errs = append(errs, errors.New("idempotencypgx: Retention must not be negative, or shorter than Lease"))
	}
	table, err = sqlident.Qualify(c.Schema, c.Table)
	if err != nil {
		errs = append(errs, fmt.Errorf("idempotencypgx: %w", err))
	}
	return table, errors.Join(errs...)
}
