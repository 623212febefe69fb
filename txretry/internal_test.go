package txretry

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/silent"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/pgtest"
	"github.com/holdfast-go/holdfast/txretry/driver"
)

// SetWaits sets the time limits for a connection and for the reply to BEGIN.
func (m *Manager) SetWaits(acquire, begin time.Duration) {
	m.bounds.acquire, m.bounds.begin = acquire, begin
}

// If a statement sent with COMMIT waits for a lock, the server reports the lock timeout before COMMIT times out.
func TestCommitOutlastsLockWaits(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		cfg  Config
		call Options
		want time.Duration
	}{
		{want: 9 * time.Second},
		{cfg: Config{LockTimeout: time.Second}, want: 9 * time.Second},
		{cfg: Config{LockTimeout: 20 * time.Second}, want: 21 * time.Second},
		{cfg: Config{LockTimeout: 20 * time.Second}, call: Options{LockTimeout: time.Second}, want: 9 * time.Second},
		{call: Options{LockTimeout: 20 * time.Second}, want: 21 * time.Second},
		{cfg: Config{CommitTimeout: 3 * time.Second}, want: 3 * time.Second},
		{cfg: Config{CommitTimeout: 3 * time.Second}, call: Options{CommitTimeout: 4 * time.Second}, want: 4 * time.Second},
	} {
		cfg := c.cfg.withDefaults()
		if got := c.call.withDefaults(&cfg).CommitTimeout; got != c.want {
			t.Errorf("manager's lock and commit timeouts %v, %v, call's %v, %v: got %v, want %v",
				c.cfg.LockTimeout, c.cfg.CommitTimeout, c.call.LockTimeout, c.call.CommitTimeout, got, c.want)
		}
	}
}

func TestBeginMessage(t *testing.T) {
	t.Parallel()
	for want, key := range map[string]beginKey{
		"begin isolation level read committed": {isolation: pgx.ReadCommitted},
		"begin isolation level serializable read only; set local lock_timeout = '8000ms'": {
			isolation: pgx.Serializable, readOnly: true, lockTimeout: 8 * time.Second,
		},
		"begin isolation level serializable; set local lock_timeout = '1ms'; set local statement_timeout = '2ms'; " +
			"set local idle_in_transaction_session_timeout = '3ms'; select pg_current_xact_id()": {
			isolation: pgx.Serializable, wantsXID: true, lockTimeout: time.Millisecond, statementTimeout: 1001 * time.Microsecond,
			idleTimeout: 3 * time.Millisecond,
		},
	} {
		if spec := key.spec(); spec.SQL != want || spec.WantsXID != key.wantsXID {
			t.Errorf("%+v: %+v", key, spec)
		}
	}
}

// A caller that computes its timeouts does not fill the memory.
func TestBeginCacheIsBounded(t *testing.T) {
	t.Parallel()
	var c beginCache
	for i := range 10 * maxBeginCache {
		c.spec(beginKey{isolation: pgx.Serializable, lockTimeout: time.Duration(i) * time.Second})
	}
	if len(c.specs) != maxBeginCache {
		t.Errorf("%d messages are cached", len(c.specs))
	}
}

func take(t *testing.T, all *turns, key string) {
	t.Helper()
	if err := all.take(t.Context(), key); err != nil {
		t.Error(err)
	}
}

func TestTurnsAreFirstComeFirstServed(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var all turns
		var order []int
		take(t, &all, "seat:1")
		for i := range 10 {
			go func() {
				take(t, &all, "seat:1")
				defer all.pass("seat:1")
				order = append(order, i) // the race detector would find two at once
				time.Sleep(time.Second)
			}()
			synctest.Wait()
		}
		take(t, &all, "seat:2") // another key is free
		all.pass("seat:2")
		all.pass("seat:1")
		time.Sleep(11 * time.Second)
		synctest.Wait()
		if !slices.IsSorted(order) || len(order) != 10 {
			t.Errorf("order = %v", order)
		}
		if len(all.waiting) != 0 {
			t.Errorf("%d keys are left behind", len(all.waiting))
		}
	})
}

func TestTurnGivenUpByContext(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var all turns
		take(t, &all, "k")
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := all.take(ctx, "k"); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("error %v although the key is held", err)
		}
		all.pass("k")
		take(t, &all, "k")
		all.pass("k")
		if len(all.waiting) != 0 {
			t.Errorf("%d keys are left behind", len(all.waiting))
		}
	})
}

type rewriter struct{}

func (rewriter) RewriteQuery(_ context.Context, _ *pgx.Conn, _ string, args []any) (string, []any, error) {
	return "rollback to a", args, nil
}

func TestIsPlain_onlyRowStatements(t *testing.T) {
	t.Parallel()
	for sql, want := range map[string]bool{
		"select 1":                            true,
		"  SELECT 1 ;\n":                      true,
		"select*from a":                       true,
		"values(1)":                           true,
		"-- name: Add :exec\r\nInsert into a": true,
		"/* a /* b */ c */--\n\t/**/ with a as ()": true,
		"":                                     false,
		"select":                               false,
		"selection":                            false,
		"select_1":                             false,
		"savepoint a":                          false,
		"select 1; savepoint a":                false,
		"/* a /* */ select 1 */ savepoint a":   false,
		"/* select 1":                          false,
		"-- select 1":                          false,
		"--\rsavepoint a\nselect 1":            false,
		"select SET_Config('role', 'a', true)": false,
		"update pg_settings set setting = 'a'": false,
		"do $$ begin end $$":                   false,
		"set local role a":                     false,
		"execute a":                            false,
		"explain analyze select 1":             false,
		"\ufeffselect 1":                       false,
	} {
		if got := isPlain(sql, nil); got != want {
			t.Errorf("isPlain(%q) = %v", sql, got)
		}
	}
	for name, args := range map[string][]any{
		"named": {pgx.NamedArgs{}}, "strict": {pgx.QueryExecModeExec, pgx.StrictNamedArgs{}}, "plain": {1, nil},
	} {
		if !isPlain("select 1", args) {
			t.Errorf("%s arguments are not plain", name)
		}
	}
	if isPlain("select 1", []any{pgx.QueryExecModeExec, rewriter{}}) {
		t.Error("a rewriter is plain")
	}
}

// impatient returns a transaction that gives the server little time.
func impatient(t *testing.T, pool *pgxpool.Pool, patience time.Duration) pgx.Tx {
	t.Helper()
	s, err := poolSource{pool}.Acquire(t.Context(), driver.Limits{Acquire: time.Minute, Begin: time.Minute, Statement: patience})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	if _, err := s.Begin(t.Context(), beginKey{isolation: pgx.ReadCommitted}.spec(), nil); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Rollback(context.WithoutCancel(t.Context())) })
	return s.Tx()
}

// slowly runs a test in a bubble, in a transaction on a Postgres that has 8 s per reply.
func slowly(t *testing.T, test func(t *testing.T, tx pgx.Tx, pause func())) {
	t.Helper()
	t.Parallel()
	url := pgtest.URL(t)
	synctest.Test(t, func(t *testing.T) {
		const patience = 8 * time.Second
		tx := impatient(t, silent.NewPostgres(t, url).Pool(t, 1), patience)
		test(t, tx, func() { time.Sleep(patience + patience/4) })
	})
}

// The caller's time between two rows does not count against the server.
func TestSlowReader(t *testing.T) {
	slowly(t, func(t *testing.T, tx pgx.Tx, pause func()) {
		const sql = "select i, repeat('x', 1000) from generate_series(1, 2000) i" // more than fits into the buffers in between
		read := func(rows pgx.Rows, err error) {
			t.Helper()
			if err != nil {
				t.Fatal(err)
			}
			n := 0
			for rows.Next() {
				if n++; n == 2 {
					pause()
				}
			}
			if rows.Err() != nil || n != 2000 {
				t.Errorf("%d rows, error %v", n, rows.Err())
			}
		}
		read(tx.Query(t.Context(), sql))

		var b pgx.Batch
		b.Queue("select 1")
		b.Queue(sql)
		b.Queue("select 2")
		results := tx.SendBatch(t.Context(), &b)
		if _, err := results.Exec(); err != nil {
			t.Fatal(err)
		}
		read(results.Query())
		pause()
		if err := results.Close(); err != nil {
			t.Error(err)
		}
	})
}

// slowSource is slow to return its second row.
type slowSource struct {
	row, rows int
	pause     func()
}

func (s *slowSource) Next() bool {
	if s.row++; s.row == 2 {
		s.pause()
	}
	return s.row <= s.rows
}

func (s *slowSource) Values() ([]any, error) { return []any{s.row}, nil }
func (s *slowSource) Err() error             { return nil }

// The time of a COPY's source does not count against the server.
func TestSlowSource(t *testing.T) {
	slowly(t, func(t *testing.T, tx pgx.Tx, pause func()) {
		if _, err := tx.Exec(t.Context(), "create table target (n int)"); err != nil {
			t.Fatal(err)
		}
		n, err := tx.CopyFrom(t.Context(), pgx.Identifier{"target"}, []string{"n"}, &slowSource{rows: 3, pause: pause})
		if n != 3 || err != nil {
			t.Errorf("%d rows, error %v", n, err)
		}
	})
}

// A COPY ends if the network accepts no more data.
func TestCopyIntoSilence(t *testing.T) {
	t.Parallel()
	direct := pgtest.New(t)
	if _, err := direct.Exec(t.Context(), "create table target (n int)"); err != nil {
		t.Fatal(err)
	}
	proxy := testenv.NewProxy(t, direct.Config().ConnString())
	tx := impatient(t, pgtest.Pool(t, proxy.URL(), 1), 200*time.Millisecond)
	row := 0
	rows := pgx.CopyFromFunc(func() ([]any, error) { // endless
		if row++; row == 1000 {
			proxy.Pause()
		}
		return []any{row}, nil
	})
	_, err := tx.CopyFrom(t.Context(), pgx.Identifier{"target"}, []string{"n"}, rows)
	proxy.Heal()
	if !errors.Is(err, driver.ErrSilent) {
		t.Errorf("error %v, want ErrSilent", err)
	}
}

// The end of the caller's context still applies when the time limit restarts for a row.
func TestCancelledBetweenRows(t *testing.T) {
	t.Parallel()
	proxy := testenv.NewProxy(t, pgtest.URL(t))
	tx := impatient(t, pgtest.Pool(t, proxy.URL(), 1), time.Hour)
	ctx, cancel := context.WithCancel(t.Context())
	rows, err := tx.Query(ctx, "select repeat('x', 100000) from generate_series(1, 100000)")
	if err != nil || !rows.Next() {
		t.Fatal(err, rows.Err())
	}
	proxy.Pause()
	cancel()
	<-time.After(100 * time.Millisecond) // meanwhile pgx sets its deadline
	tx.(*connTx).until = time.Now()      // so that the time limit restarts for the next row
	for rows.Next() {
		continue // rows that had arrived
	}
	proxy.Heal()
	if err := rows.Err(); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v, want the error of the context", err)
	}
}

func TestPatience(t *testing.T) {
	t.Parallel()
	for want, o := range map[time.Duration]Options{
		9 * time.Second:  {},
		21 * time.Second: {LockTimeout: 20 * time.Second},
		6 * time.Second:  {StatementTimeout: 5 * time.Second},
		0:                {StatementTimeout: -1},
	} {
		if got := o.patience(); got != want {
			t.Errorf("%+v: %v, want %v", o, got, want)
		}
	}
}

func TestFate(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	source, begun := poolSource{pool}, time.Now()
	limits := driver.Limits{Acquire: time.Minute, Begin: time.Minute}
	want := func(xid string, want driver.Outcome, wantErr error) {
		t.Helper()
		if got, err := source.Fate(t.Context(), limits, xid, begun); got != want || !errors.Is(err, wantErr) {
			t.Errorf("fate of %s: %v, error %v, want %v, %v", xid, got, err, want, wantErr)
		}
	}
	begin := func() (s driver.Session, xid string) {
		t.Helper()
		s, err := source.Acquire(t.Context(), limits)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := s.Begin(t.Context(), beginKey{isolation: pgx.Serializable, wantsXID: true}.spec(), nil); err != nil {
			t.Fatal(err)
		}
		return s, s.XID()
	}
	for end, outcome := range map[string]driver.Outcome{"commit": driver.Committed, "rollback": driver.RolledBack} {
		s, xid := begin()
		if _, err := s.Tx().Exec(t.Context(), end); err != nil {
			t.Error(err)
		}
		s.Close()
		want(xid, outcome, nil)
	}
	busy, xid := begin()
	asleep, wake := context.WithCancel(t.Context())
	var sleeping sync.WaitGroup
	sleeping.Go(func() { _, _ = busy.Tx().Exec(asleep, "select pg_sleep(600)") })
	testenv.Eventually(t, func() error {
		var active bool
		err := pool.QueryRow(t.Context(), "select exists (select from pg_stat_activity where backend_xid::text = $1 and state = 'active')", xid).Scan(&active)
		if err == nil && !active {
			err = errors.New("not running yet")
		}
		return err
	})
	want(xid, driver.Unknown, nil)
	want(xid, driver.Unknown, nil) // it was not ended
	wake()
	sleeping.Wait()
	busy.Close()
	abandoned, xid := begin()
	testenv.Eventually(t, func() error {
		if got, err := source.Fate(t.Context(), limits, xid, begun); got != driver.RolledBack {
			return fmt.Errorf("fate %v, error %w", got, err)
		}
		return nil
	})
	_ = abandoned.Rollback(t.Context()) // the server has closed the connection
	abandoned.Close()
	want("4000000000000", driver.Unknown, driver.ErrForgotten)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := source.Fate(ctx, limits, "1", begun); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
}
