package expirypgx_test

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/expiry"
	"github.com/holdfast-go/holdfast/expiry/driver"
	"github.com/holdfast-go/holdfast/expiry/expirypgx"
	"github.com/holdfast-go/holdfast/expiry/expirytest/conformance"
	"github.com/holdfast-go/holdfast/internal/pgtest"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/txretry"
)

const schema = `
CREATE TABLE holds (
	id text PRIMARY KEY,
	expires_at timestamptz NOT NULL,
	status text NOT NULL,
	seat text
);
CREATE INDEX ON holds (expires_at, id) WHERE status = 'held';
CREATE TABLE events (hold_id text NOT NULL, event_id uuid PRIMARY KEY, at timestamptz NOT NULL DEFAULT clock_timestamp())`

// backend is a schema of its own with the tables above.
type backend struct {
	pool      *pgxpool.Pool
	isolation pgx.TxIsoLevel
	table     string // empty: holds
	silent    bool   // its connections fall silent, and a COMMIT is given up as ever
}

// patient is a manager that waits for the answer to COMMIT for as long as a busy disk takes.
type patient struct{ *txretry.Manager }

func (m patient) DoWith(ctx context.Context, opts txretry.Options, fn func(context.Context, pgx.Tx) error) error {
	opts.CommitTimeout = testenv.Patience
	return m.Manager.DoWith(ctx, opts, fn)
}

func newBackend(t *testing.T) *backend {
	t.Helper()
	return backendOn(t, pgtest.New(t))
}

func backendOn(t *testing.T, pool *pgxpool.Pool) *backend {
	t.Helper()
	b := &backend{pool: pool}
	b.exec(t, schema)
	return b
}

func (b *backend) exec(t *testing.T, sql string, args ...any) {
	t.Helper()
	if _, err := b.pool.Exec(t.Context(), sql, args...); err != nil {
		t.Fatal(err)
	}
}

func (b *backend) scan(t *testing.T, dest any, sql string, args ...any) {
	t.Helper()
	if err := b.pool.QueryRow(t.Context(), sql, args...).Scan(dest); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
}

func (b *backend) store(t *testing.T, cfg expirypgx.Config) *expirypgx.Store {
	t.Helper()
	manager, err := txretry.New(b.pool, txretry.Config{BaseDelay: time.Millisecond})
	must(t, err)
	var transactor txretry.Transactor = patient{manager}
	if b.silent {
		transactor = manager
	}
	cfg.Logger = cmp.Or(cfg.Logger, slog.New(slog.DiscardHandler))
	s, err := expirypgx.New(transactor, cmp.Or(b.table, "holds"), cfg)
	must(t, err)
	return s
}

func (b *backend) Store(t *testing.T, emit conformance.Emit) driver.Store {
	t.Helper()
	return b.store(t, expirypgx.Config{Emit: emit, Isolation: b.isolation})
}

func (b *backend) Put(t *testing.T, id, state string, in time.Duration) {
	t.Helper()
	b.exec(t, `INSERT INTO holds (id, status, expires_at) VALUES ($1, $2, now() + $3)
		ON CONFLICT (id) DO UPDATE SET status = excluded.status, expires_at = excluded.expires_at`, id, state, in)
}

func (b *backend) State(t *testing.T, id string) (state string) {
	t.Helper()
	b.scan(t, &state, "SELECT status FROM holds WHERE id = $1", id)
	return state
}

func (b *backend) Announce(ctx context.Context, tx pgx.Tx, row expiry.Row) error {
	_, err := tx.Exec(ctx, "INSERT INTO events (hold_id, event_id) VALUES ($1, $2)",
		row.ID, expiry.EventID("hold.expired", row.ID, row.Deadline).String())
	return err
}

func (b *backend) Fail(ctx context.Context, tx pgx.Tx, sqlState string) error {
	_, err := tx.Exec(ctx, "DO $$ BEGIN RAISE 'failed' USING ERRCODE = '"+sqlState+"'; END $$")
	return err
}

func (b *backend) Announced(t *testing.T, id string) (n int) {
	t.Helper()
	b.scan(t, &n, "SELECT count(*) FROM events WHERE hold_id = $1", id)
	return n
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// untilState waits until a row is in a state.
func (b *backend) untilState(t *testing.T, id, want string) {
	t.Helper()
	eventually(t, func() error {
		if got := b.State(t, id); got != want {
			return fmt.Errorf("row %s is %s, want %s", id, got, want)
		}
		return nil
	})
}

// newSweeper returns a sweeper that writes no log unless the configuration has a logger.
func newSweeper(t *testing.T, store driver.Store, cfg expiry.SweeperConfig) *expiry.Sweeper {
	t.Helper()
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	sw, err := expiry.NewSweeper(store, cfg)
	must(t, err)
	return sw
}

func plain(t *testing.T, body func(t *testing.T)) { body(t) }

func TestConformance(t *testing.T) {
	t.Parallel()
	conformance.Test(t, func(t *testing.T) conformance.Backend { return newBackend(t) }, plain)
}

func TestConformanceBehindPgBouncer(t *testing.T) {
	t.Parallel()
	conformance.Test(t, func(t *testing.T) conformance.Backend { return backendOn(t, pgtest.NewPooled(t)) }, plain)
}

func TestConformanceSerializable(t *testing.T) {
	t.Parallel()
	conformance.Test(t, func(t *testing.T) conformance.Backend {
		b := newBackend(t)
		b.isolation = pgx.Serializable
		return b
	}, plain)
}
