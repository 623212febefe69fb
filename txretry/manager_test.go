package txretry_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/silent"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/pgtest"
	"github.com/holdfast-go/holdfast/txretry"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

// After failed attempt n, with a random number r: min(1000ms, (0.5+r) × 50ms × 2^n).
func TestDelays(t *testing.T) {
	t.Parallel()
	for random, want := range map[float64][5]time.Duration{ // ms
		0:    {50, 100, 200, 400, 800},
		0.25: {75, 150, 300, 600, 1000},
		0.5:  {100, 200, 400, 800, 1000},
		0.75: {125, 250, 500, 1000, 1000},
	} {
		t.Run(fmt.Sprint(random), func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) { checkDelays(t, random, want) })
		})
	}
}

func checkDelays(t *testing.T, random float64, wants [5]time.Duration) {
	t.Helper()
	script := make([]txretrytest.Fault, 6)
	for i := range script {
		script[i] = txretrytest.Fault{Point: txretrytest.AtCommit, SQLSTATE: "40001"}
	}
	m := txretrytest.New(txretrytest.Config{Script: script, Retry: txretry.Config{Rand: func() float64 { return random }}})
	var begun []time.Time
	err := m.Do(t.Context(), func(context.Context, pgx.Tx) error {
		begun = append(begun, time.Now())
		return nil
	})
	if err == nil || len(begun) != 6 {
		t.Fatalf("%d attempts, error %v; want 6 and an error", len(begun), err)
	}
	for i, want := range wants {
		if got := begun[i+1].Sub(begun[i]); got != want*time.Millisecond {
			t.Errorf("delay after failed attempt %d: %v, want %v", i+1, got, want*time.Millisecond)
		}
	}
}

func TestNewRefuses(t *testing.T) {
	t.Parallel()
	if _, err := txretry.New(nil, txretry.Config{}); err == nil || !strings.Contains(err.Error(), "pool") {
		t.Errorf("nil pool: error %v", err)
	}
	if _, err := txretry.NewOver(nil, txretry.Config{}); err == nil || !strings.Contains(err.Error(), "source") {
		t.Errorf("nil source: error %v", err)
	}
	pool, err := pgxpool.New(t.Context(), "postgres://nobody@127.0.0.1:1/none")
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	_, err = txretry.New(pool, txretry.Config{
		Isolation: "chaos", MaxAttempts: -1, LockTimeout: time.Microsecond, StatementTimeout: time.Microsecond,
		BaseDelay: -1, MaxDelay: -1, CommitTimeout: -1, IdleTimeout: time.Microsecond,
	})
	if err == nil {
		t.Fatal("no error")
	}
	for _, field := range []string{
		"Isolation", "MaxAttempts", "LockTimeout", "StatementTimeout",
		"BaseDelay", "MaxDelay", "CommitTimeout", "IdleTimeout",
	} {
		if !strings.Contains(err.Error(), "Config."+field) {
			t.Errorf("the error does not name %s: %v", field, err)
		}
	}
}

// A user's test of its error mapping creates these errors itself.
func TestErrorsMadeByHand(t *testing.T) {
	t.Parallel()
	for _, err := range []error{&txretry.LockTimeoutError{}, &txretry.LockTimeoutError{Name: "seats.hold"}, &txretry.CommitUnknownError{}} {
		if err.Error() == "" || errors.Is(err, pgx.ErrTxClosed) {
			t.Errorf("error %v", err)
		}
	}
}

// preparedPool returns a correctly configured pool on the server.
func preparedPool(t *testing.T, server *testenv.Server, conns int32) *pgxpool.Pool {
	t.Helper()
	cfg, err := pgxpool.ParseConfig(server.URL())
	if err != nil {
		t.Fatal(err)
	}
	cfg.MaxConns = conns
	txretry.PreparePool(cfg)
	return openPool(t, cfg)
}

// wantFindings checks that there is one finding for each of the texts.
func wantFindings(t *testing.T, m *txretry.Manager, texts ...string) {
	t.Helper()
	err := m.Check(t.Context())
	if len(texts) == 0 {
		if err != nil {
			t.Errorf("findings %v, want none", err)
		}
		return
	}
	joined, ok := err.(interface{ Unwrap() []error })
	if !ok || len(joined.Unwrap()) != len(texts) {
		t.Fatalf("want %d findings: %v", len(texts), err)
	}
	for i, text := range texts {
		found := joined.Unwrap()[i]
		finding, ok := found.(interface{ Fix() string })
		if !ok || finding.Fix() == "" || !strings.HasPrefix(found.Error(), "txretry: ") || !strings.Contains(found.Error(), text) {
			t.Errorf("finding %v, want one about %s", found, text)
		}
	}
}

func TestCheck(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	pool := func(param, value string) *pgxpool.Pool {
		cfg, err := pgxpool.ParseConfig(withParam(t, url, param, value))
		if err != nil {
			t.Fatal(err)
		}
		txretry.PreparePool(cfg)
		return openPool(t, cfg)
	}
	wantFindings(t, newManager(t, pool("pool_max_conns", "4"), txretry.Config{}))
	wantFindings(t, newManager(t, pool("pool_max_conns", "4"), txretry.Config{Isolation: pgx.ReadCommitted}))
	wantFindings(t, newManager(t, pool("default_transaction_read_only", "on"), txretry.Config{}), "default_transaction_read_only")
	raw, err := pgxpool.New(t.Context(), withParam(t, url, "pool_max_conns", "1000"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(raw.Close)
	wantFindings(t, newManager(t, raw, txretry.Config{}), "1000 connections", "no time limits to connect")
}

// Check tries another connection if one falls silent. A silent server is an error.
func TestCheckOfSilentServer(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	synctest.Test(t, func(t *testing.T) {
		s := silent.NewPostgres(t, url)
		cfg := s.Config(t, 2)
		txretry.PreparePool(cfg)
		m := newManager(t, s.Open(t, cfg), txretry.Config{})
		s.SilenceOn(testenv.Silence{On: "server_version_num"})
		start := time.Now()
		err := m.Check(t.Context()) // may return findings
		if errors.Is(err, context.DeadlineExceeded) || s.Silenced() != 1 {
			t.Errorf("%v, %d connections silent", err, s.Silenced())
		}
		silent.Took(t, "Check", start, 5*time.Second)
		s.Pause()
		if err := m.Check(t.Context()); err == nil {
			t.Error("no error")
		}
	})
}

// The server has few predicate locks, and then becomes a hot standby.
func TestServer_misconfigured(t *testing.T) {
	t.Parallel()
	server := testenv.Private(t, testenv.Postgres, "-c", "max_pred_locks_per_transaction=10", "-c", "max_connections=12", "-c", "superuser_reserved_connections=0")
	pool := preparedPool(t, server, 8)
	m := newManager(t, pool, txretry.Config{})
	wantFindings(t, m, "max_pred_locks_per_transaction is 10")
	wantFindings(t, newManager(t, pool, txretry.Config{Isolation: pgx.ReadCommitted}))
	t.Run("out of predicate locks", func(t *testing.T) { testOutOfPredicateLocks(t, m, pool) })
	exec(t, pool, "create table counter (id int primary key, n int not null); insert into counter values (1, 7)")
	var data string
	if err := pool.QueryRow(t.Context(), "show data_directory").Scan(&data); err != nil {
		t.Fatal(err)
	}
	err := errors.Join(server.Stop(), os.WriteFile(filepath.Join(data, "standby.signal"), nil, 0o644), server.Start(t.Context()))
	if err != nil {
		t.Fatal(err)
	}
	pool.Reset()
	t.Run("hot standby", func(t *testing.T) { testHotStandby(t, m, pool) })
}

// The server's table of predicate locks is full. The error names the setting. The call is not retried, because a
// retry would need the same table.
func testOutOfPredicateLocks(t *testing.T, m *txretry.Manager, pool *pgxpool.Pool) {
	exec(t, pool, "create table seat (id int primary key, state int); insert into seat select g, 0 from generate_series(1, 50000) g; analyze seat")
	look := func(ctx context.Context, tx pgx.Tx, id int) error {
		return tx.QueryRow(ctx, "select state from seat where id = $1", id).Scan(new(int))
	}
	calls := 0
	err := m.Do(soon(t), func(ctx context.Context, open pgx.Tx) error {
		if err := look(ctx, open, 1); err != nil {
			return err
		}
		for n := range 50_000 { // the server keeps the locks of each transaction until fn returns
			err := m.Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
				calls++
				_, err := tx.Exec(ctx, "update seat set state = 1 where id = $1", n)
				return errors.Join(err, look(ctx, tx, 1+n*31%50_000), look(ctx, tx, 1+n*57%50_000))
			})
			if err != nil {
				if calls != n+1 {
					t.Errorf("%d attempts for %d calls", calls, n+1)
				}
				return err
			}
		}
		return fmt.Errorf("the table took the locks of %d transactions", calls)
	})
	wantUnavailable(t, err, "fn")
	wantSQLSTATE(t, err, "53200")
	if !strings.Contains(err.Error(), "max_pred_locks_per_transaction") {
		t.Errorf("error %q does not name the setting", err)
	}
}

func testHotStandby(t *testing.T, m *txretry.Manager, pool *pgxpool.Pool) {
	if err := m.Check(t.Context()); err == nil || !strings.Contains(err.Error(), "hot standby") {
		t.Errorf("Check: %v", err)
	}
	asking := newManager(t, pool, txretry.Config{XactStatus: true})
	look := func(ctx context.Context, tx pgx.Tx) error {
		var n int
		return tx.QueryRow(ctx, "select n from counter").Scan(&n)
	}
	for name, test := range map[string]struct {
		m    *txretry.Manager
		opts txretry.Options
		fn   func(ctx context.Context, tx pgx.Tx) error
		code string // "": succeeds
	}{
		"serializable":           {m, txretry.Options{}, look, "0A000"},
		"write":                  {m, txretry.Options{Isolation: pgx.ReadCommitted}, func(ctx context.Context, tx pgx.Tx) error { return add(ctx, tx, 1) }, "25006"},
		"write, error swallowed": {m, txretry.Options{Isolation: pgx.ReadCommitted}, func(ctx context.Context, tx pgx.Tx) error { _ = add(ctx, tx, 1); return nil }, "25006"},
		"id of the transaction":  {asking, txretry.Options{Isolation: pgx.ReadCommitted}, look, "25006"},
		"read only":              {m, txretry.Options{Isolation: pgx.RepeatableRead, ReadOnly: true}, look, ""},
		"read only, asking":      {asking, txretry.Options{Isolation: pgx.ReadCommitted, ReadOnly: true}, look, ""},
	} {
		err := test.m.DoWith(t.Context(), test.opts, test.fn)
		if test.code == "" {
			if err != nil {
				t.Errorf("%s: %v", name, err)
			}
			continue
		}
		if !errors.Is(err, txretry.ErrStandby) {
			t.Errorf("%s: error %v, want ErrStandby", name, err)
		}
		wantSQLSTATE(t, err, test.code)
	}
}
