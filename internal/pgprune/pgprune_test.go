package pgprune_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/metrictest"
	"github.com/holdfast-go/holdfast/internal/pgprune"
	"github.com/holdfast-go/holdfast/internal/pgtest"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

func old(due int) []pgprune.Statement {
	return []pgprune.Statement{{Table: "old", ID: "n", Due: "n <= $1 ORDER BY n", Args: []any{due}}}
}

// table makes a table with the rows 1 to n; those to due are due.
func table(t *testing.T, pool *pgxpool.Pool, n, due int) pgprune.Config {
	t.Helper()
	for _, sql := range []string{`CREATE TABLE old (n int PRIMARY KEY)`, `INSERT INTO old SELECT generate_series(1, $1::int)`} {
		args := []any{n}[:strings.Count(sql, "$1")]
		if _, err := pool.Exec(t.Context(), sql, args...); err != nil {
			t.Fatal(err)
		}
	}
	return pgprune.Config{Pool: pool, Table: `"old"`, Core: "outbox", Statements: old(due)}
}

func newPruner(t *testing.T, cfg pgprune.Config) *pgprune.Pruner {
	t.Helper()
	p, err := pgprune.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func rows(t *testing.T, pool *pgxpool.Pool) (n int) {
	t.Helper()
	if err := pool.QueryRow(t.Context(), `SELECT count(*) FROM old`).Scan(&n); err != nil {
		t.Fatal(err)
	}
	return n
}

// eventually waits until the table has this many rows.
func eventually(t *testing.T, pool *pgxpool.Pool, want int) {
	t.Helper()
	for deadline := time.Now().Add(testenv.Patience); rows(t, pool) != want; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%d rows left, want %d", rows(t, pool), want)
		}
	}
}

// Several processes at once, in a database whose default would make them fail.
func TestPrune(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t, pgtest.URL(t)+"&default_transaction_isolation=serializable", 8)
	cfg := table(t, pool, 5100, 5000)
	meter := &metrictest.Recorder{}
	cfg.MeterProvider = meter
	var deleted atomic.Int64
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			n, err := newPruner(t, cfg).Prune(t.Context())
			if err != nil {
				t.Error(err)
			}
			if left := rows(t, pool); left != 100 {
				t.Errorf("%d rows left after a Prune", left)
			}
			deleted.Add(int64(n))
		})
	}
	wg.Wait()
	if deleted.Load() != 5000 {
		t.Errorf("%d rows deleted, want 5000", deleted.Load())
	}
	if counted := meter.Values("holdfast.outbox.pruned"); !slices.Equal(counted, []float64{5000}) {
		t.Errorf("the counter says %v", counted)
	}
}

// A count is what Prune deletes, and deletes nothing. What somebody has locked counts, too.
func TestCount(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	p := newPruner(t, table(t, pool, 1500, 1200))
	other, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer other.Rollback(context.WithoutCancel(t.Context()))
	if _, err := other.Exec(t.Context(), `SELECT FROM old WHERE n = 3 FOR UPDATE`); err != nil {
		t.Fatal(err)
	}
	if n, err := p.Count(t.Context()); n != 1200 || err != nil || rows(t, pool) != 1500 {
		t.Errorf("Count = %d, %v, and left %d rows", n, err, rows(t, pool))
	}
	if _, err := pool.Exec(t.Context(), `INSERT INTO old SELECT generate_series(-200000, 0)`); err != nil {
		t.Fatal(err)
	}
	if n, err := p.Count(t.Context()); n != pgprune.MaxCount || err != nil {
		t.Errorf("Count = %d, %v, want the bound", n, err)
	}
}

func TestPruneEnds(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	p := newPruner(t, table(t, pool, 10, 10))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if n, err := p.Prune(ctx); n != 0 || !errors.Is(err, context.Canceled) {
		t.Errorf("Prune = %d, %v", n, err)
	}
}

// A pass leaves a table alone that another process prunes; Prune waits for it. Rows that somebody
// has locked are left to a later pass.
func TestPruneTaken(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	cfg := table(t, pool, 20, 10)
	var log bytes.Buffer
	cfg.Logger = slog.New(slog.NewTextHandler(&log, nil))
	p := newPruner(t, cfg)

	other, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer other.Rollback(context.WithoutCancel(t.Context()))
	lock := `SELECT n, pg_try_advisory_xact_lock(hashtextextended('holdfast prune ' || 'old'::regclass::oid, 0)) FROM old WHERE n = 3 FOR UPDATE`
	if _, err := other.Exec(t.Context(), lock); err != nil {
		t.Fatal(err)
	}
	p.Pass(t.Context())
	if n := rows(t, pool); n != 20 || log.Len() > 0 {
		t.Errorf("a pass left %d rows of 20 in the hand of another; log %q", n, log.String())
	}
	short, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	if n, err := p.Prune(short); n != 0 || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Prune in the hand of another = %d, %v", n, err)
	}

	if _, err := other.Exec(t.Context(), `COMMIT; BEGIN; SELECT FROM old WHERE n = 3 FOR UPDATE`, pgx.QueryExecModeSimpleProtocol); err != nil {
		t.Fatal(err)
	}
	if n, err := p.Prune(t.Context()); n != 9 || err != nil {
		t.Errorf("Prune beside a locked row = %d, %v, want 9", n, err)
	}
	if err := other.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	if n, err := p.Prune(t.Context()); n != 1 || err != nil {
		t.Errorf("Prune = %d, %v, want the row that was locked", n, err)
	}
}

func TestRun(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	cfg := table(t, pool, 20, 10)
	cfg.Interval = 20 * time.Millisecond
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		newPruner(t, cfg).Run(ctx)
	}()
	eventually(t, pool, 10)
	if _, err := pool.Exec(t.Context(), `INSERT INTO old VALUES (-1), (-2)`); err != nil {
		t.Fatal(err)
	}
	eventually(t, pool, 10)
	stop()
	<-ended
}

// Written starts a pass when one is due.
func TestWritten(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	cfg := table(t, pool, 20, 10)
	cfg.Interval = time.Millisecond
	p := newPruner(t, cfg)
	for deadline := time.Now().Add(testenv.Patience); rows(t, pool) != 10 && time.Now().Before(deadline); {
		p.Written()
	}
	eventually(t, pool, 10)
}

// A negative interval turns passes off; Prune still works.
func TestOff(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	cfg := table(t, pool, 20, 10)
	cfg.Interval = -1
	p := newPruner(t, cfg)
	p.Run(t.Context())
	p.Written()
	p.Pass(t.Context())
	if n := rows(t, pool); n != 20 {
		t.Errorf("%d rows left", n)
	}
	if n, err := p.Prune(t.Context()); n != 10 || err != nil {
		t.Errorf("Prune = %d, %v", n, err)
	}
}

// A failing pass is one line, and the next one works.
func TestFailure(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	var log bytes.Buffer
	cfg := pgprune.Config{
		Pool: pool, Table: `"old"`, Core: "outbox", Statements: old(10),
		Logger:  slog.New(slog.NewTextHandler(&log, nil)),
		Explain: func(err error) error { return errors.Join(errors.New("call Migrate first"), err) },
	}
	p := newPruner(t, cfg)
	p.Pass(t.Context())
	if lines := strings.Count(log.String(), "\n"); lines != 1 || !strings.Contains(log.String(), "42P01") {
		t.Errorf("%d lines: %s", lines, log.String())
	}
	if _, err := p.Prune(t.Context()); err == nil || !strings.Contains(err.Error(), "outboxpgx: prune: call Migrate first") {
		t.Errorf("Prune = %v", err)
	}
	table(t, pool, 20, 10)
	p.Pass(t.Context())
	if n := rows(t, pool); n != 10 {
		t.Errorf("%d rows left", n)
	}
	if busy := pool.Stat().AcquiredConns(); busy != 0 {
		t.Errorf("%d connections were not given back", busy)
	}
}

// A step of 1,000 rows that takes longer than its bound is repeated with 100.
func TestSlowStep(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	cfg := table(t, pool, 250, 250)
	cfg.Statements[0] = pgprune.Statement{Table: "old", ID: "n", Due: "pg_sleep(CASE WHEN $1 > 100 THEN 60 ELSE 0 END)::text = '' ORDER BY n"}
	if n, err := newPruner(t, cfg).Prune(t.Context()); n != 250 || err != nil {
		t.Errorf("Prune = %d, %v, want 250", n, err)
	}
}
