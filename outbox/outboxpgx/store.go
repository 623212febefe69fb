package outboxpgx

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/migrate"
	"github.com/holdfast-go/holdfast/internal/pgcall"
	"github.com/holdfast-go/holdfast/internal/pgnotify"
	"github.com/holdfast-go/holdfast/internal/pgprune"
	"github.com/holdfast-go/holdfast/internal/telemetry"
)

// Config tunes a Store. The zero value works. All Stores of one outbox must agree on Schema and Table.
type Config struct {
	// Schema holds the tables. Default: the search path decides.
	Schema string
	// Table is the name of the table of messages, at most 40 characters; the others are named after
	// it, with _lanes, _dead, _audit, _pause and _dedup behind. Default: holdfast_outbox.
	Table string
	// MaxBodyBytes is the largest body that Write takes. Default: 1 MiB.
	MaxBodyBytes int
	// DedupRetention is for how long WriteOnce remembers a key, at least 1 ms. Default: 24 h.
	DedupRetention time.Duration
	// Retention is for how long published messages are kept, with published_at. All Stores that
	// relay or prune must agree on it. Default: they are deleted as soon as they are confirmed, and
	// those kept before are pruned.
	Retention time.Duration
	// PruneInterval is the pause between two rounds in which a relay on this Store deletes what is
	// older than DedupRetention, Retention, and a year of the audit. Negative: it deletes nothing;
	// call Prune. Default: 1 minute.
	PruneInterval time.Duration
	// PollOnly turns wake-ups between processes off: the Store neither tells relays elsewhere of a
	// commit nor listens. They find messages when they poll. Default: it does both.
	PollOnly bool
	// Logger gets one line for each outage of wake-ups and each round of pruning that failed, and tells of rows that cannot
	// be changed. Default: slog.Default().
	Logger *slog.Logger
}

// Store is an outbox in Postgres: writers write to it in their own transactions, relays read from it.
// It is safe for concurrent use, by any number of relays in any number of processes. Two Stores of one
// table know nothing of each other, so a process best has one.
type Store struct {
	pool     *pgxpool.Pool
	renewals *pgcall.Reserve
	cfg      Config
	t        tables
	sql      statements
	set      migrate.Set
	schema   fs.FS

	lanesPerClaim int
	maxBatchBytes int64
	horizon       horizon
	nextDue       nextDue
	lost          lostClaims
	slow          slowClaims
	refusals      refusals
	refusedDue    refusedDue
	hidden        hidden

	pruner      *pgprune.Pruner
	relays      relays
	afterCommit func() // Wake, made once
	sender      *pgnotify.Sender
	listener    *pgnotify.Listener

	dead       *deadLetters
	complaints telemetry.SeldomEach
}

const (
	// defaultLanesPerClaim leaves lanes to other relays, and fills a batch.
	defaultLanesPerClaim = 4
	// defaultMaxBatchBytes bounds the bodies of one batch; its first message is always taken.
	defaultMaxBatchBytes = 32 << 20
)

// New returns a Store on the pool; it asks no server. A relay needs two connections of the pool, and
// unless PollOnly is set it takes a third one out of it, beside the pool's maximum, to listen. That one
// must reach Postgres itself or a pooler in session mode. All else works behind a pooler in transaction
// mode too.
func New(pool *pgxpool.Pool, cfg Config) (*Store, error) {
	cfg.Table = cmp.Or(cfg.Table, defaultTable)
	cfg.DedupRetention = cmp.Or(cfg.DedupRetention, defaultDedupRetention)
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	t, err := tablesOf(cfg.Schema, cfg.Table)
	if err := errors.Join(err, cfg.validate(pool)); err != nil {
		return nil, err
	}
	set, schema, err := migrations(cfg.Schema, cfg.Table)
	if err != nil {
		return nil, err
	}
	s := &Store{
		pool: pool, renewals: pgcall.NewReserve(pool), cfg: cfg, t: t, sql: t.statements(), set: set, schema: schema,
		lanesPerClaim: defaultLanesPerClaim, maxBatchBytes: defaultMaxBatchBytes,
	}
	s.dead = newDeadLetters(pool, t, s.Wake)
	if s.pruner, err = s.newPruner(); err != nil {
		return nil, err
	}
	s.afterCommit = s.Wake
	s.connect()
	return s, nil
}

const defaultDedupRetention = 24 * time.Hour

func (c Config) validate(pool *pgxpool.Pool) error {
	var errs []error
	if pool == nil {
		errs = append(errs, errors.New("outboxpgx: New needs a pool"))
	}
	if c.MaxBodyBytes < 0 {
		errs = append(errs, fmt.Errorf("outboxpgx: Config.MaxBodyBytes is %d, want 0 or more", c.MaxBodyBytes))
	}
	if c.DedupRetention < time.Millisecond {
		errs = append(errs, fmt.Errorf("outboxpgx: Config.DedupRetention is %v, want at least 1 ms", c.DedupRetention))
	}
	if c.Retention < 0 {
		errs = append(errs, fmt.Errorf("outboxpgx: Config.Retention is %v, want 0 or more", c.Retention))
	}
	return errors.Join(errs...)
}

// callTimeout bounds calls whose context has no deadline. Those of a relay have one.
const callTimeout = 30 * time.Second

// use runs fn on a connection.
func (s *Store) use(ctx context.Context, fn func(context.Context, *pgxpool.Conn) error) error {
	if _, ok := ctx.Deadline(); !ok {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, callTimeout)
		defer cancel()
	}
	return pgcall.Use(ctx, s.pool, fn)
}

// send runs a batch in one round trip.
func (s *Store) send(ctx context.Context, queue *pgx.Batch) error {
	return s.use(ctx, func(ctx context.Context, conn *pgxpool.Conn) error { return conn.SendBatch(ctx, queue).Close() })
}
