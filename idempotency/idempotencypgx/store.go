package idempotencypgx

import (
	"context"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/idempotency/driver"
	pgxdriver "github.com/holdfast-go/holdfast/idempotency/idempotencypgx/driver"
	"github.com/holdfast-go/holdfast/internal/breaker"
	"github.com/holdfast-go/holdfast/internal/migrate"
	"github.com/holdfast-go/holdfast/internal/pgcall"
	"github.com/holdfast-go/holdfast/internal/pgprune"
	"github.com/holdfast-go/holdfast/internal/sqlident"
	"github.com/holdfast-go/holdfast/internal/telemetry"
	"github.com/holdfast-go/holdfast/txretry"
)

// ErrIgnored is in every error about a change of the Store's table that Postgres accepted but did not make: a
// trigger, a rule or a row-level-security policy dropped it. A transaction whose record was dropped is rolled back.
// Check names the cause.
var ErrIgnored = pgcall.ErrIgnored

const component = "idempotencypgx"

//go:embed migrations/*.sql
var files embed.FS

// Store runs business transactions that take effect once per key, even after crashes, because the answer is stored in
// the transaction itself. It is also the store of the middleware. It is safe for concurrent use.
type Store struct {
	tx      txretry.Transactor
	cfg     Config
	records pgxdriver.Records
	front   driver.Store // receives the middleware's calls
	behind  driver.Store // decides while front is unavailable; nil: no fallback
	table   *table       // nil: Config.Records is set
	schema  fs.FS        // the files that Migrate applies

	claimsAtBegin bool // transactions claim their keys
	expected      expectation
	pruner        *pgprune.Pruner
	seldom        *telemetry.SeldomEach
}

// New returns a Store whose records are in the database of t. The table must exist:
// see Migrate.
func New(t txretry.Transactor, cfg Config) (*Store, error) {
	cfg = cfg.withDefaults()
	pool := poolOf(t)
	name, err := cfg.validate(t, pool)
	if err != nil {
		return nil, err
	}
	set, err := cfg.set()
	if err != nil {
		return nil, err
	}
	schema, err := migrate.Export(set)
	if err != nil {
		return nil, err
	}
	s := &Store{schema: schema, tx: t, cfg: cfg, records: cfg.Records, seldom: &telemetry.SeldomEach{}}
	if s.records == nil {
		s.table = newTable(pool, name, cfg.Retention)
		s.records = s.table
		if s.pruner, err = s.table.newPruner(cfg); err != nil {
			return nil, err
		}
	}
	switch {
	case cfg.Gate != nil:
		s.front, s.behind = cfg.Gate, alone{s}
	case cfg.Lease > 0:
		s.front = &claims{table: s.table, lease: cfg.Lease, expected: &s.expected, written: s.written}
	default:
		s.front, s.claimsAtBegin = alone{s}, s.table != nil
	}
	return s, nil
}

func poolOf(t txretry.Transactor) *pgxpool.Pool {
	if p, ok := t.(interface{ Pool() *pgxpool.Pool }); ok {
		return p.Pool()
	}
	return nil
}

// Begin implements driver.Store.
func (s *Store) Begin(ctx context.Context, claim driver.Claim) (driver.BeginResult, error) {
	return s.front.Begin(ctx, claim)
}

// Extend implements driver.Store.
func (s *Store) Extend(ctx context.Context, claim driver.Claim) error {
	return s.front.Extend(ctx, claim)
}

// Complete implements driver.Store.
func (s *Store) Complete(ctx context.Context, claim driver.Claim, resp driver.Response) error {
	return s.front.Complete(ctx, claim, resp)
}

// Release implements driver.Store.
func (s *Store) Release(ctx context.Context, claim driver.Claim) error {
	return s.front.Release(ctx, claim)
}

// Fallback implements driver.Tiered: while the gate is unavailable the records decide. A key with a record is
// answered from it. Without a record every request may try, but only one of several concurrent transactions commits,
// and all requests get its answer. This protects only the work in the transaction of Do, not the rest of a handler.
func (s *Store) Fallback() driver.Store { return s.behind }

// Prune deletes the records whose retention is over and returns their number, also with an error. Concurrent callers
// share the work.
func (s *Store) Prune(ctx context.Context) (int, error) {
	if s.pruner == nil {
		return 0, nil
	}
	return s.pruner.Prune(ctx)
}

// Prunable returns the number of records that Prune would delete now, at most 100,000, which means "as many or more".
func (s *Store) Prunable(ctx context.Context) (int, error) {
	if s.pruner == nil {
		return 0, nil
	}
	return s.pruner.Count(ctx)
}

// written notes for the pruner that a record was stored.
func (s *Store) written() {
	if s.pruner != nil {
		s.pruner.Written()
	}
}

// log writes a line about a failure, at most one per message in a while.
func (s *Store) log(ctx context.Context, msg string, err error) {
	if skipped, ok := s.seldom.Due(msg); ok {
		s.cfg.Logger.LogAttrs(ctx, slog.LevelError, msg, slog.Any("error", err), slog.Int("repeats", skipped))
	}
}

// Migrate creates or updates the table. Several processes may call it at once.
func (s *Store) Migrate(ctx context.Context) error {
	if s.table == nil {
		return nil
	}
	set, err := s.cfg.set()
	if err != nil {
		return err
	}
	return migrate.Apply(ctx, s.table.asker.pool, set)
}

// Check returns the problems of the table, or nil: a joined error for each finding, with the method Fix. Another
// error means that the table could not be read.
func (s *Store) Check(ctx context.Context) error {
	if s.table == nil {
		return nil
	}
	return s.table.check(ctx)
}

func (c Config) set() (migrate.Set, error) {
	dir, err := fs.Sub(files, "migrations")
	if err != nil {
		return migrate.Set{}, fmt.Errorf("idempotencypgx: %w", err)
	}
	return migrate.Set{Component: component, Files: dir, Schema: c.Schema, Names: map[string]string{"table": c.Table}}, nil
}

// Schema returns the numbered SQL files that Migrate applies, and the .down.sql files that undo them, for a migration
// tool. No other package uses the same numbers. Each file records that it was applied, so Migrate does not repeat the
// tool's work.
func (s *Store) Schema() fs.FS { return s.schema }

// Grants returns the privileges that a database role needs for one job, each as the text between GRANT and TO. The
// job "idempotency" is for the middleware and Do, "operate" is for Look, Check and Prune. It is nil for other jobs,
// and with Config.Records.
func (s *Store) Grants(job string) []string {
	noted := migrate.Grant(s.cfg.Schema) // lets Migrate see that nothing is to do
	switch {
	case s.table == nil:
	case job == "idempotency":
		return sqlident.Granted(s.cfg.Schema, append(noted, `SELECT, INSERT, UPDATE, DELETE ON `+s.table.name)...)
	case job == "operate":
		return sqlident.Granted(s.cfg.Schema, append(noted, `SELECT, UPDATE (token), DELETE ON `+s.table.name)...)
	}
	return nil
}

// Config configures a Store. The zero value is usable.
type Config struct {
	// Schema is the schema of the table. Default: the search path decides.
	Schema string
	// Table is the name of the table. Default: "holdfast_idempotency".
	Table string
	// Gate is a store in front, such as idempotencyredis: it keeps concurrent requests apart and replays fast.
	// Default: none, Postgres alone decides.
	Gate driver.Store
	// Lease is how long a claim lasts without renewal, at least 10 ms. With a Lease, claims are rows of the table.
	// They also protect handlers that answer without Do, but cost two statements more for each request. Default: the
	// transaction claims the key when it begins. Lease must be 0 if there is a Gate, which has its own leases.
	Lease time.Duration
	// Retention is how long a record lasts. With a Lease it counts from the claim; if the work took longer than a
	// Lease, it counts from one Lease before the answer. Default: 48 h.
	Retention time.Duration
	// PruneInterval is the time between two passes in which this process deletes records that are older than
	// Retention. A request that stores a record starts the pass. Default: 1 minute. Negative: never, call Prune.
	PruneInterval time.Duration
	// Records replace the table; a Transactor without a pool needs them. Default: the table, in the database of the
	// Transactor.
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
		errs = append(errs, errors.New("idempotencypgx: the transactor has no pool: set Records"))
	}
	if c.Lease != 0 && c.Lease < 10*time.Millisecond {
		errs = append(errs, errors.New("idempotencypgx: Lease must be at least 10ms"))
	}
	if c.Lease != 0 && c.Gate != nil {
		errs = append(errs, errors.New("idempotencypgx: Lease and Gate are both set: the gate has its own leases"))
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

// asker sends single statements, each of which may be repeated. So a connection on which the server is silent costs
// only a short wait.
type asker struct {
	pool    *pgxpool.Pool
	reserve *pgcall.Reserve // for renewals
	server  *breaker.Server
	missing migrate.Missing
}

func newAsker(pool *pgxpool.Pool, table string) *asker {
	a := &asker{pool: pool, reserve: pgcall.NewReserve(pool), missing: migrate.Missing{Call: "Migrate of the idempotencypgx.Store", Tables: []string{table}}}
	a.server = breaker.NewServer(answered, func(context.Context) { pgcall.Sweep(pool, breaker.Longest) })
	return a
}

// answered reports whether err is an answer of Postgres.
func answered(err error) bool {
	_, ok := errors.AsType[*pgconn.PgError](err)
	return ok || errors.Is(err, pgx.ErrNoRows)
}

// ask calls fn until Postgres answers. With guarded the breaker limits the calls to a server that has not answered
// lately.
func (a *asker) ask(ctx context.Context, guarded bool, fn func(ctx context.Context, conn *pgxpool.Conn) error) error {
	err := a.server.Ask(ctx, guarded, func(ctx context.Context) error { return pgcall.Use(ctx, a.pool, fn) })
	return a.missing.Explain(err)
}

// exec is ask for a statement without rows; it returns the number of changed rows.
func (a *asker) exec(ctx context.Context, guarded bool, sql string, args ...any) (rows int64, err error) {
	err = a.ask(ctx, guarded, func(ctx context.Context, conn *pgxpool.Conn) error {
		tag, err := conn.Exec(ctx, sql, args...)
		rows = tag.RowsAffected()
		return err
	})
	return rows, err
}

// renew is exec for a statement that renews a lease. It does not wait for the pool, because the work under the leases
// may hold all connections of the pool.
func (a *asker) renew(ctx context.Context, sql string, args ...any) (rows int64, err error) {
	err = a.server.Ask(ctx, false, func(ctx context.Context) error {
		return a.reserve.Use(ctx, func(ctx context.Context, conn *pgx.Conn) error {
			tag, err := conn.Exec(ctx, sql, args...)
			rows = tag.RowsAffected()
			return err
		})
	})
	return rows, a.missing.Explain(err)
}
