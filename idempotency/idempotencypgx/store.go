package idempotencypgx

import (
	"context"
	"embed"
	"fmt"
	"io/fs"
	"log/slog"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/idempotency/driver"
	pgxdriver "github.com/holdfast-go/holdfast/idempotency/idempotencypgx/driver"
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
