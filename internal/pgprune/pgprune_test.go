package pgprune_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/metrictest"
	"github.com/holdfast-go/holdfast/internal/pgcall"
	"github.com/holdfast-go/holdfast/internal/pgprune"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/pgtest"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

func old(due int) []pgprune.Statement {
	return []pgprune.Statement{{Table: "old", ID: "n", Due: "n <= $1 ORDER BY n", Args: []any{due}}}
}

// table creates a table with the rows 1 to n, of which the first due rows are due.
func table(t *testing.T, pool *pgxpool.Pool, n, due int) pgprune.Config {
	t.Helper()
	exec(t, pool, fmt.Sprintf(`CREATE TABLE old (n int PRIMARY KEY); INSERT INTO old SELECT generate_series(1, %d)`, n))
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

// execer is a pool or a transaction.
type execer interface {
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
}

func exec(t *testing.T, on execer, sql string) {
	t.Helper()
	if _, err := on.Exec(t.Context(), sql, pgx.QueryExecModeSimpleProtocol); err != nil {
		t.Fatal(err)
	}
}

// begin returns a transaction that is rolled back when the test ends.
func begin(t *testing.T, pool *pgxpool.Pool, sql string) pgx.Tx {
	t.Helper()
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) })
	exec(t, tx, sql)
	return tx
}

func rows(t *testing.T, pool *pgxpool.Pool) (n int) {
	t.Helper()
	if err := pool.QueryRow(t.Context(), `SELECT count(*) FROM old`).Scan(&n); err != nil {
		t.Fatal(err)
	}
	return n
}

func wantRows(t *testing.T, pool *pgxpool.Pool, want int) {
	t.Helper()
	if n := rows(t, pool); n != want {
		t.Errorf("%d rows left, want %d", n, want)
	}
}

func wantPruned(t *testing.T, p *pgprune.Pruner, want int) {
	t.Helper()
	if n, err := p.Prune(t.Context()); n != want || err != nil {
		t.Errorf("Prune = %d, %v, want %d", n, err, want)
	}
}

// untilRows waits until the table has this many rows.
func untilRows(t *testing.T, pool *pgxpool.Pool, want int) {
	t.Helper()
	testenv.Eventually(t, func() error {
		if n := rows(t, pool); n != want {
			return fmt.Errorf("%d rows left, want %d", n, want)
		}
		return nil
	})
}

// Several processes prune together, in a database whose default isolation level would make them fail.
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
			wantRows(t, pool, 100)
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

// Count returns the number of rows that Prune deletes, and deletes none. It also counts locked rows.
func TestCount(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	cfg := table(t, pool, 1500, 1200)
	begin(t, pool, `SELECT FROM old WHERE n = 3 FOR UPDATE`)
	if n, err := newPruner(t, cfg).Count(t.Context()); n != 1200 || err != nil {
		t.Errorf("Count = %d, %v, want 1200", n, err)
	}
	wantRows(t, pool, 1500)
	cfg.Statements[0].Table = "generate_series(-200000, 0) n"
	if n, err := newPruner(t, cfg).Count(t.Context()); n != pgprune.MaxCount || err != nil {
		t.Errorf("Count = %d, %v, want the bound", n, err)
	}
}

// A pass skips a table that another process prunes; Prune waits for it. Locked rows stay for a later pass.
func TestPruneTaken(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	cfg := table(t, pool, 20, 10)
	var log bytes.Buffer
	cfg.Logger = slog.New(slog.NewTextHandler(&log, nil))
	p := newPruner(t, cfg)

	other := begin(t, pool, `SELECT n, pg_try_advisory_xact_lock(hashtextextended('holdfast prune ' || 'old'::regclass::oid, 0)) FROM old WHERE n = 3 FOR UPDATE`)
	p.Pass(t.Context())
	if n := rows(t, pool); n != 20 || log.Len() > 0 {
		t.Errorf("a pass left %d rows of 20 in the hand of another; log %q", n, log.String())
	}
	short, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond) // timing: it must pass
	defer cancel()
	if n, err := p.Prune(short); n != 0 || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Prune in the hand of another = %d, %v", n, err)
	}

	exec(t, other, `COMMIT; BEGIN; SELECT FROM old WHERE n = 3 FOR UPDATE`)
	wantPruned(t, p, 9)
	exec(t, other, `ROLLBACK`)
	wantPruned(t, p, 1)
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
	untilRows(t, pool, 10)
	exec(t, pool, `INSERT INTO old VALUES (-1), (-2)`)
	untilRows(t, pool, 10)
	stop()
	<-ended
}

// Written starts a pass if one is due.
func TestWritten(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	cfg := table(t, pool, 20, 10)
	cfg.Interval = time.Millisecond
	p := newPruner(t, cfg)
	testenv.Eventually(t, func() error {
		p.Written()
		if n := rows(t, pool); n != 10 {
			return fmt.Errorf("%d rows left", n)
		}
		return nil
	})
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
	wantRows(t, pool, 20)
	wantPruned(t, p, 10)
}

// A failed pass logs one line, and the next pass works.
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
	wantRows(t, pool, 10)
	if busy := pool.Stat().AcquiredConns(); busy != 0 {
		t.Errorf("%d connections were not given back", busy)
	}
}

// Rows that cannot be deleted are skipped and reported. The other rows and tables are pruned.
func TestPrune_leavesRowsThatAreRefused(t *testing.T) {
	t.Parallel()
	pgtest.New(t) // skips before there are subtests
	const held = `n IN (1, 2, 700, 1000, 1099)`
	raise := func(code string) string {
		return `CREATE FUNCTION keep() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'kept' USING ERRCODE = '` + code + `'; END $$;
			CREATE TRIGGER keep BEFORE DELETE ON old FOR EACH ROW WHEN (OLD.` + held + `) EXECUTE FUNCTION keep()`
	}
	for name, c := range map[string]struct{ sql, fix, want string }{
		"foreign key":           {`CREATE TABLE kept (n int REFERENCES old); INSERT INTO kept SELECT n FROM old WHERE ` + held, `DROP TABLE kept`, "violates foreign key constraint"},
		"class 22":              {raise("22001"), `DROP FUNCTION keep CASCADE`, "kept"},
		"class 55":              {raise("55000"), `DROP FUNCTION keep CASCADE`, "kept"},
		"class 55, a parameter": {raise("55P02"), `DROP FUNCTION keep CASCADE`, "kept"},
		"class 40":              {raise("40002"), `DROP FUNCTION keep CASCADE`, "kept"},
		"assertion":             {raise("P0004"), `DROP FUNCTION keep CASCADE`, "kept"},
		"at COMMIT": {`CREATE FUNCTION keep() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'kept'; END $$;
			CREATE CONSTRAINT TRIGGER keep AFTER DELETE ON old DEFERRABLE INITIALLY DEFERRED FOR EACH ROW WHEN (OLD.` + held + `) EXECUTE FUNCTION keep()`,
			`DROP FUNCTION keep CASCADE`, "kept"},
		"trigger that drops": {`CREATE FUNCTION keep() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$;
			CREATE TRIGGER keep BEFORE DELETE ON old FOR EACH ROW WHEN (OLD.` + held + `) EXECUTE FUNCTION keep()`, `DROP FUNCTION keep CASCADE`, pgcall.ErrIgnored.Error()},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := pgtest.New(t)
			cfg := table(t, pool, 1200, 1100)
			var log bytes.Buffer
			cfg.Logger = slog.New(slog.NewTextHandler(&log, nil))
			exec(t, pool, `CREATE TABLE other (n int PRIMARY KEY); INSERT INTO other VALUES (1)`)
			cfg.Statements = append(cfg.Statements, pgprune.Statement{Table: "missing", ID: "n", Due: "n < $1", Args: []any{9}}, pgprune.Statement{Table: "other", ID: "n", Due: "n < $1", Args: []any{9}})
			exec(t, pool, c.sql)
			p := newPruner(t, cfg)
			n, err := p.Prune(t.Context())
			if n != 1096 || err == nil || !strings.Contains(err.Error(), "row 1 of table old cannot be deleted") || !strings.Contains(err.Error(), c.want) ||
				!strings.Contains(err.Error(), "and 4 more rows") || !strings.Contains(err.Error(), `"missing" does not exist`) {
				t.Errorf("Prune = %d, %v", n, err)
			}
			wantRows(t, pool, 105)
			p.Pass(t.Context())
			if strings.Count(log.String(), "\n") != 1 || !strings.Contains(log.String(), c.want) {
				t.Errorf("log: %s", log.String())
			}
			exec(t, pool, c.fix+`; CREATE TABLE missing (n int)`)
			wantPruned(t, p, 5)
		})
	}
}

// A step of 1,000 rows that is too slow is repeated with 100. The server bounds each step.
func TestPrune_smallerStepsAfterATimeout(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	cfg := table(t, pool, 250, 250)
	exec(t, pool, `CREATE FUNCTION due(rows int) RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN
		IF current_setting('statement_timeout') <> '5s' THEN RAISE 'the step has no bound'; END IF;
		IF rows > 100 THEN RAISE SQLSTATE '57014' USING MESSAGE = 'canceling statement due to statement timeout'; END IF;
		RETURN true; END $$`)
	cfg.Statements[0] = pgprune.Statement{Table: "old", ID: "n", Due: "due($1::int) ORDER BY n"}
	wantPruned(t, newPruner(t, cfg), 250)
}
