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

// ErrIgnored is inside every error about a change of the Store's table that Postgres accepted and did not make: a
// trigger, a rule or a row-level-security policy dropped it. A transaction whose record was dropped is rolled back. Check
// names the cause.
var ErrIgnored = pgcall.ErrIgnored

const component = "idempotencypgx"

//go:embed migrations/*.sql
var files embed.FS

// Store runs business transactions that take effect once per key, whatever crashes
// in between: the answer is stored in the transaction itself. It is also the store
// of the middleware. It is safe for concurrent use.
type Store struct {
	tx      txretry.Transactor
	cfg     Config
	records pgxdriver.Records
	front   driver.Store // whom the middleware's calls go to
	behind  driver.Store // decides when front cannot be asked; nil: there is nothing
	table   *table       // nil: the records are not in a table of ours
	schema  fs.FS        // what Migrate does

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

// Fallback implements driver.Tiered: while the gate cannot be asked the records
// decide. A key that has one is answered from it; without one every request may try,
// and of those at the same time only one transaction commits, whose answer all of
// them get. So it protects what handlers do in the transaction of Do, and nothing
// else they do.
func (s *Store) Fallback() driver.Store { return s.behind }

// Prune deletes the records whose retention is over and returns their number, also
// with an error. Several callers share the work.
func (s *Store) Prune(ctx context.Context) (int, error) {
	if s.pruner == nil {
		return 0, nil
	}
	return s.pruner.Prune(ctx)
}

// Prunable returns how many records Prune would delete by now: at most 100,000, which means as many or
// more.
func (s *Store) Prunable(ctx context.Context) (int, error) {
	if s.pruner == nil {
		return 0, nil
	}
	return s.pruner.Count(ctx)
}

// written follows a record that was stored.
func (s *Store) written() {
	if s.pruner != nil {
		s.pruner.Written()
	}
}

// log writes a line about a failure, unless there was one just before.
func (s *Store) log(ctx context.Context, msg string, err error) {
	if skipped, ok := s.seldom.Due(msg); ok {
		s.cfg.Logger.LogAttrs(ctx, slog.LevelError, msg, slog.Any("error", err), slog.Int("skipped", skipped))
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

// Check returns what is wrong with the table, and nil if nothing is: an error for
// each finding, with the method Mend, or why it could not look.
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

// Schema returns the numbered SQL files that Migrate applies, and the .down.sql files that undo them,
// for a migration tool. No other package has the same numbers. Each file notes that it was applied:
// Migrate finds done what the tool has done.
func (s *Store) Schema() fs.FS { return s.schema }

// Grants returns what a role of the database needs for one job and no more, each the text between GRANT
// and TO. The job "idempotency" is that of the middleware and of Do, "operate" is Look, Check and Prune.
// Of another job it is nil, and with Config.Records too.
func (s *Store) Grants(job string) []string {
	noted := migrate.Grant(s.cfg.Schema) // so that Migrate finds that nothing is to be done
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

// asker sends single statements, each of which may be repeated, so that a
// connection on which the server is silent costs a short wait.
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

// answered reports whether an error is Postgres's own answer.
func answered(err error) bool {
	_, ok := errors.AsType[*pgconn.PgError](err)
	return ok || errors.Is(err, pgx.ErrNoRows)
}

// ask calls fn until Postgres answers. With guarded it spares a server that has not
// answered lately.
func (a *asker) ask(ctx context.Context, guarded bool, fn func(ctx context.Context, conn *pgxpool.Conn) error) error {
	err := a.server.Ask(ctx, guarded, func(ctx context.Context) error { return pgcall.Use(ctx, a.pool, fn) })
	return a.missing.Explain(err)
}

// exec is ask for a statement that returns nothing but how many rows it changed.
func (a *asker) exec(ctx context.Context, guarded bool, sql string, args ...any) (rows int64, err error) {
	err = a.ask(ctx, guarded, func(ctx context.Context, conn *pgxpool.Conn) error {
		tag, err := conn.Exec(ctx, sql, args...)
		rows = tag.RowsAffected()
		return err
	})
	return rows, err
}

// renew is exec for a statement that renews a lease: it does not wait for the pool, whose connections the work under
// the leases may hold.
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
