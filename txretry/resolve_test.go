package txretry_test

import (
	"context"
	"errors"
	"fmt"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/silent"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/pgtest"
	"github.com/holdfast-go/holdfast/txretry"
)

// witness is the row of the Witness.
const witness = "insert into witness values (1)"

// lookForWitness waits for the other transaction.
func lookForWitness(ctx context.Context, tx pgx.Tx) (committed bool, err error) {
	_, err = tx.Exec(ctx, witness)
	var refused *pgconn.PgError
	if errors.As(err, &refused) && refused.Code == "23505" {
		return true, nil
	}
	return false, err
}

// resolvers are the ways to find the outcome.
var resolvers = map[string]struct {
	status bool // Config.XactStatus
	opts   txretry.Options
}{
	"status":  {status: true},
	"witness": {opts: txretry.Options{Witness: lookForWitness}},
}

// work adds 1 and writes the witness row.
func work(calls, committed *int, disturb func(ctx context.Context, tx pgx.Tx)) func(ctx context.Context, tx pgx.Tx) error {
	return func(ctx context.Context, tx pgx.Tx) error {
		*calls++
		txretry.AfterCommit(tx, func() { *committed++ })
		if _, err := tx.Exec(ctx, witness); err != nil {
			return err
		}
		if err := add(ctx, tx, 1); err != nil {
			return err
		}
		disturb(ctx, tx)
		return nil
	}
}

// resolved runs work, and checks that it took effect once, in the given number of calls of fn.
func resolved(t *testing.T, m *txretry.Manager, opts txretry.Options, direct *pgxpool.Pool, wantCalls int, disturb func(ctx context.Context, tx pgx.Tx, call int)) {
	t.Helper()
	calls, committed := 0, 0
	err := m.DoWith(t.Context(), opts, work(&calls, &committed, func(ctx context.Context, tx pgx.Tx) { disturb(ctx, tx, calls) }))
	if err != nil || calls != wantCalls || committed != 1 {
		t.Errorf("error %v after %d calls, %d functions run; want success in %d", err, calls, committed, wantCalls)
	}
	wantCounter(t, direct, 1)
}

// The connection is lost, or becomes silent, after COMMIT has arrived.
func TestResolveCommitReplyLost(t *testing.T) {
	t.Parallel()
	for name, resolver := range resolvers {
		for _, hangs := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, silent %v", name, hangs), func(t *testing.T) {
				t.Parallel()
				direct := newCounter(t)
				exec(t, direct, "create table witness (id int primary key)")
				olderThan(t, direct, 15*time.Second)
				synctest.Test(t, func(t *testing.T) {
					s := silent.NewPostgres(t, direct.Config().ConnString())
					m := newManager(t, s.Pool(t, 2), txretry.Config{XactStatus: resolver.status, Logger: quiet})
					start := time.Now()
					calls, committed := 0, 0
					err := m.DoWith(t.Context(), resolver.opts, work(&calls, &committed, func(context.Context, pgx.Tx) {
						if hangs {
							s.SilenceOn(testenv.Silence{On: "commit", Deliver: true})
						} else {
							s.Hangup = func([]byte) []byte { return nil }
						}
					}))
					if err != nil || calls != 1 || committed != 1 {
						t.Errorf("error %v after %d calls, %d functions run", err, calls, committed)
					}
					if hangs {
						silent.Took(t, "the call", start, 9*time.Second)
					}
				})
				wantCounter(t, direct, 1)
			})
		}
	}
}

// olderThan waits until the server has run for longer than a call takes on the clock of a bubble. For a younger
// server, the Manager cannot exclude a crash, and the outcome is unknown.
func olderThan(t *testing.T, pool *pgxpool.Pool, age time.Duration) {
	t.Helper()
	testenv.Eventually(t, func() error {
		var old bool
		err := pool.QueryRow(t.Context(), "select stats_reset < now() - make_interval(secs => $1) from pg_stat_bgwriter", age.Seconds()).Scan(&old)
		if err == nil && !old {
			err = errors.New("the server has just started")
		}
		return err
	})
}

// The backend ends before it receives COMMIT: nothing is applied, so fn runs again.
func TestResolveTerminatedBeforeCommit(t *testing.T) {
	t.Parallel()
	for name, resolver := range resolvers {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := newCounter(t)
			exec(t, pool, "create table witness (id int primary key)")
			m := newManager(t, pool, txretry.Config{XactStatus: resolver.status})
			resolved(t, m, resolver.opts, pool, 2, func(_ context.Context, tx pgx.Tx, call int) {
				if call == 1 {
					exec(t, pool, "select pg_terminate_backend($1, 5000)", pidOf(t, tx))
				}
			})
		})
	}
}

// The backend ends while COMMIT is running.
func TestResolveDuringCommit(t *testing.T) {
	t.Parallel()
	for name, resolver := range resolvers {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := newCounter(t)
			exec(t, pool, "create table witness (id int primary key)")
			release := heldCommit(t, pool)
			opts := resolver.opts
			opts.CommitTimeout, opts.LockTimeout = time.Minute, testenv.Patience
			resolved(t, newManager(t, pool, txretry.Config{XactStatus: resolver.status}), opts, pool, 2, func(_ context.Context, tx pgx.Tx, call int) {
				if call > 1 {
					return
				}
				pid := pidOf(t, tx)
				go func() {
					defer release()
					whileCommitting(t, pool, pid, "pg_terminate_backend(pid)")
				}()
			})
		})
	}
}

// The outcome of a read-only transaction does not matter: it is retried.
func TestReadOnlyCommitLost(t *testing.T) {
	t.Parallel()
	pool := newCounter(t)
	m := newManager(t, pool, txretry.Config{})
	run := func(terminations int) (calls int, err error) {
		err = m.DoWith(t.Context(), txretry.Options{ReadOnly: true, MaxAttempts: 2}, func(_ context.Context, tx pgx.Tx) error {
			if calls++; calls <= terminations {
				exec(t, pool, "select pg_terminate_backend($1, 5000)", pidOf(t, tx))
			}
			return nil
		})
		return calls, err
	}
	if calls, err := run(1); calls != 2 || err != nil {
		t.Errorf("error %v after %d calls, want success after two", err, calls)
	}
	calls, err := run(2)
	if calls != 2 {
		t.Errorf("%d calls, want two", calls)
	}
	wantUnavailable(t, err, "commit")
}

// If the client of a Witness vanishes, its locks are released like those of fn's transaction.
func TestWitnessIsBounded(t *testing.T) {
	t.Parallel()
	pool := newCounter(t)
	var bound string
	opts := txretry.Options{IdleTimeout: 7 * time.Second, Witness: func(ctx context.Context, tx pgx.Tx) (bool, error) {
		return true, tx.QueryRow(ctx, "show idle_in_transaction_session_timeout").Scan(&bound)
	}}
	err := newManager(t, pool, txretry.Config{}).DoWith(t.Context(), opts, func(_ context.Context, tx pgx.Tx) error {
		exec(t, pool, "select pg_terminate_backend($1, 5000)", pidOf(t, tx))
		return nil
	})
	if err != nil || bound != "7s" {
		t.Errorf("error %v, the bound is %q", err, bound)
	}
}

// After a crash, the server may give a transaction's id to another transaction, if it had written nothing about the
// id to disk. The outcome of the other transaction is not used, and the other transaction is not ended.
func TestResolveAfterACrash(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		crash func(t *testing.T, server *testenv.Server)
		then  string // the other transaction's statement before the query for the outcome
		last  string // its statement after the query
	}{
		"the server is killed":       {killServer, "commit", ""},
		"one of its backends killed": {killBackend, "select", "commit"}, // the backend is idle in its transaction
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if test.last == "" {
				testenv.Nightly(t, "kills a server; the other test kills a backend")
			}
			// Nothing else takes an id, or writes the next id to disk.
			server := testenv.Private(t, testenv.Postgres, "-c", "autovacuum=off", "-c", "wal_level=minimal", "-c", "max_wal_senders=0")
			proxy := testenv.NewProxy(t, server.URL())
			m := newManager(t, pgtest.Pool(t, proxy.URL(), 2), txretry.Config{XactStatus: true, CommitTimeout: testenv.Patience})
			var other *pgx.Conn
			calls, happened := 0, make(chan struct{})
			err := m.Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
				if calls++; calls > 1 {
					return errors.New("it ran again")
				}
				var lost string
				if err := tx.QueryRow(ctx, "select pg_current_xact_id()::text").Scan(&lost); err != nil {
					return err
				}
				proxy.SilenceOn(testenv.Silence{On: "commit"})
				go func() {
					defer close(happened)
					defer proxy.CutConnections()
					testenv.Eventually(t, func() error { return silenced(proxy) })
					test.crash(t, server)
					if other = takeID(t, server.URL(), lost); other != nil {
						execOn(t, other, test.then)
					}
				}()
				return nil
			})
			<-happened
			wantUnknown(t, err)
			if other != nil {
				execOn(t, other, test.last)
				_ = other.Close(t.Context())
			}
		})
	}
}

func silenced(proxy *testenv.Proxy) error {
	if proxy.Silenced() == 0 {
		return errors.New("COMMIT was not sent")
	}
	return nil
}

func execOn(t *testing.T, conn *pgx.Conn, sql string) {
	t.Helper()
	if _, err := conn.Exec(t.Context(), sql); err != nil {
		t.Errorf("%s: %v", sql, err)
	}
}

// takeID begins a transaction with the given id.
func takeID(t *testing.T, url, id string) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), url)
	if err != nil {
		t.Error(err)
		return nil
	}
	var got string
	execOn(t, conn, "begin")
	if err := conn.QueryRow(t.Context(), "select pg_current_xact_id()::text").Scan(&got); err != nil || got != id {
		t.Errorf("the id %s was given out as %s, %v", id, got, err)
	}
	return conn
}

func killServer(t *testing.T, server *testenv.Server) {
	t.Helper()
	if err := errors.Join(server.Kill(), server.Start(t.Context())); err != nil {
		t.Error(err)
	}
}

// killBackend returns when the server has recovered. The server process itself continues. A server that notices the
// kill ends all other sessions, and rejects new ones until it has recovered.
func killBackend(t *testing.T, server *testenv.Server) {
	t.Helper()
	killed, err := pgx.Connect(t.Context(), server.URL())
	if err != nil {
		t.Error(err)
		return
	}
	other, err := pgx.Connect(t.Context(), server.URL())
	if err != nil {
		t.Error(err)
		return
	}
	if err := syscall.Kill(int(killed.PgConn().PID()), syscall.SIGKILL); err != nil {
		t.Error(err)
		return
	}
	if _, err := other.Exec(t.Context(), "select pg_sleep(600)"); err == nil { // until the server ends the session
		t.Error("no other session was ended")
	}
	testenv.Eventually(t, func() error {
		conn, err := pgx.Connect(t.Context(), server.URL())
		if err == nil {
			err = conn.Close(t.Context())
		}
		return err
	})
}
