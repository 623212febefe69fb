package expirypgx_test

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/expiry"
	"github.com/holdfast-go/holdfast/expiry/driver"
	"github.com/holdfast-go/holdfast/expiry/expirypgx"
	"github.com/holdfast-go/holdfast/internal/expiry/conformance"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/pgtest"
	"github.com/holdfast-go/holdfast/txretry"
)

func TestMain(m *testing.M) {
	rawURL := os.Getenv(killURLVar)
	if rawURL == "" {
		os.Exit(testenv.Run(m))
	}
	step, err := strconv.ParseInt(os.Getenv(killStepVar), 10, 64)
	if err == nil {
		err = sweepAndDie(rawURL, step)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

const schema = `
CREATE TABLE holds (
	id text PRIMARY KEY,
	expires_at timestamptz NOT NULL,
	status text NOT NULL,
	seat text
);
CREATE INDEX ON holds (expires_at, id) WHERE status = 'held';
CREATE TABLE events (hold_id text NOT NULL, event_id uuid PRIMARY KEY, at timestamptz NOT NULL DEFAULT clock_timestamp())`

// backend is a separate schema with the tables above.
type backend struct {
	pool      *pgxpool.Pool
	isolation pgx.TxIsoLevel
	table     string // empty: holds
	silent    bool   // its connections may fall silent, and COMMIT has its usual timeout
}

// patient is a manager that waits for the answer to COMMIT as long as a busy disk takes.
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

// untilState waits until a row has a state.
func (b *backend) untilState(t *testing.T, id, want string) {
	t.Helper()
	eventually(t, func() error {
		if got := b.State(t, id); got != want {
			return fmt.Errorf("row %s is %s, want %s", id, got, want)
		}
		return nil
	})
}

// newSweeper returns a sweeper that logs nothing unless cfg has a logger.
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

// fill makes rows 0 to n-1; row 0 is the longest overdue.
func (b *backend) fill(t *testing.T, n int) {
	t.Helper()
	b.exec(t, `INSERT INTO holds (id, status, expires_at, seat)
		SELECT n::text, 'held', now() - interval '1 hour' + n * interval '1 ms', 'A' || n % 3 FROM generate_series(0, $1 - 1) n`, n)
}

func (b *backend) count(t *testing.T, condition string) (n int) {
	t.Helper()
	b.scan(t, &n, "SELECT count(*) FROM holds WHERE "+condition)
	return n
}

func quiet() expiry.SweeperConfig {
	return expiry.SweeperConfig{Logger: slog.New(slog.DiscardHandler)}
}

func sweep(t *testing.T, s driver.Store, cfg expiry.SweeperConfig) expiry.Report {
	t.Helper()
	cfg.BatchTimeout = time.Minute
	report, err := newSweeper(t, s, cfg).Sweep(t.Context())
	must(t, err)
	return report
}

func eventually(t *testing.T, check func() error) {
	t.Helper()
	testenv.Eventually(t, check)
}

func announceAll(b *backend) func(context.Context, pgx.Tx, []expiry.Row) error {
	return func(ctx context.Context, tx pgx.Tx, rows []expiry.Row) error {
		for _, row := range rows {
			if err := b.Announce(ctx, tx, row); err != nil {
				return err
			}
		}
		return nil
	}
}

// lines is a log that may be read while it is written.
type lines struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.Write(p)
}

func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.String()
}

// background runs fn until the test ends or stop is called.
func background(t *testing.T, fn func(context.Context) error) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- fn(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run returned %v", err)
		}
	})
	t.Cleanup(stop)
	return stop
}

// sweeper runs a sweeper on all rows of b until the test ends.
func (b *backend) sweeper(t *testing.T, cfg expiry.SweeperConfig) (*expirypgx.Store, *expiry.Sweeper) {
	t.Helper()
	store := b.store(t, expirypgx.Config{Emit: announceAll(b), Isolation: b.isolation})
	sw := newSweeper(t, store, cfg)
	background(t, sw.Run)
	eventually(t, func() error { return sw.Ready(t.Context()) })
	return store, sw
}

// onTime is the largest allowed delay of an expiry. An idle machine needs a tenth of it, and a sweeper without a
// wake-up would be later.
const onTime = 10 * time.Second

// latest waits until n rows have expired, and returns the largest delay.
func (b *backend) latest(t *testing.T, n int) (late time.Duration) {
	t.Helper()
	eventually(t, func() error {
		var events int
		var seconds float64
		err := b.pool.QueryRow(t.Context(), `SELECT count(*), coalesce(extract(epoch FROM max(at - expires_at)), 0)::float8
			FROM events JOIN holds ON holds.id = hold_id`).Scan(&events, &seconds)
		if err == nil && events < n {
			err = fmt.Errorf("%d of %d rows have expired", events, n)
		}
		late = time.Duration(seconds * float64(time.Second))
		return err
	})
	return late
}

// hold makes a row in its own transaction, and announces it by Due.
func hold(t *testing.T, store *expirypgx.Store, id string, in time.Duration) {
	t.Helper()
	manager, err := txretry.New(expirypgx.PoolOf(store), txretry.Config{})
	must(t, err)
	err = manager.Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
		deadline, err := insertHold(ctx, tx, id, in)
		if err == nil && !store.Due(tx, deadline) {
			err = errors.New("Due rejected the transaction")
		}
		return err
	})
	must(t, err)
}

func insertHold(ctx context.Context, tx pgx.Tx, id string, in time.Duration) (deadline time.Time, err error) {
	err = tx.QueryRow(ctx, "INSERT INTO holds (id, status, expires_at) VALUES ($1, 'held', clock_timestamp() + $2) RETURNING expires_at", id, in).Scan(&deadline)
	return deadline, err
}

func (b *backend) heldAtMost(t *testing.T, rows int) error {
	t.Helper()
	if left := b.count(t, "status = 'held'"); left > rows {
		return fmt.Errorf("%d rows are still held, want %d at most", left, rows)
	}
	return nil
}

const trigger = `CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN %s; RETURN new; END $$;
	CREATE TRIGGER slow BEFORE UPDATE ON holds FOR EACH ROW WHEN (old.id = '0') EXECUTE FUNCTION slow()`
