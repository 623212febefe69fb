package txretry_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/pgtest"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/txretry"
	"github.com/holdfast-go/holdfast/txretry/driver"
)

var quiet = slog.New(slog.DiscardHandler)

// cached is in the name under which pgx has prepared a statement.
const cached = "stmtcache_"

// behindProxy returns a counter, and a pool that reaches it through a proxy. Its connections are
// open, and have prepared the statement of work.
func behindProxy(t *testing.T, conns int, work func(ctx context.Context, tx pgx.Tx) error) (direct, pool *pgxpool.Pool, proxy *testenv.Proxy) {
	t.Helper()
	direct = newCounter(t)
	proxy = testenv.NewProxy(t, direct.Config().ConnString())
	pool = pgtest.Pool(t, proxy.URL(), int32(conns))
	var held []*pgxpool.Conn
	for range conns {
		conn, err := pool.Acquire(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		held = append(held, conn)
		if err := pgx.BeginFunc(t.Context(), conn, func(tx pgx.Tx) error { return work(t.Context(), tx) }); err != nil {
			t.Fatal(err)
		}
	}
	for _, conn := range held {
		conn.Release()
	}
	return direct, pool, proxy
}

// runAtOnce runs a subtest beside the others of its test: they wait more than they work.
func runAtOnce(t *testing.T, all *sync.WaitGroup, name string, test func(t *testing.T)) {
	all.Go(func() { t.Run(name, test) })
}

func addOne(ctx context.Context, tx pgx.Tx) error { return add(ctx, tx, 1) }

// soon fails the test when a call waits for much longer than its bounds.
func soon(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	t.Cleanup(cancel)
	return ctx
}

func wantUnavailable(t *testing.T, err error, phase string) {
	t.Helper()
	var unavailable *txretry.UnavailableError
	if !errors.As(err, &unavailable) || unavailable.Phase != phase {
		t.Fatalf("error %v, want *UnavailableError of phase %s", err, phase)
	}
	if unavailable.HTTPStatus() != http.StatusServiceUnavailable || unavailable.Code() != "DATABASE_UNAVAILABLE" || unavailable.RetryAfter() != time.Second {
		t.Errorf("maps to %d %s after %v", unavailable.HTTPStatus(), unavailable.Code(), unavailable.RetryAfter())
	}
}

// BEGIN has no effect: it is sent again on another connection, and the call does not notice.
func TestSilentBegin(t *testing.T) {
	t.Parallel()
	var all sync.WaitGroup
	defer all.Wait()
	for name, silence := range map[string]testenv.Silence{
		"request lost": {On: "begin"},
		"answer lost":  {On: "begin", Deliver: true},
	} {
		for kind, atBegin := range map[string]driver.Statement{"": {}, ", AtBegin": {SQL: "select 1"}} {
			runAtOnce(t, &all, name+kind, func(t *testing.T) {
				direct, pool, proxy := behindProxy(t, 1, addOne)
				m := newManager(t, pool, txretry.Config{Logger: quiet})
				proxy.SilenceOn(silence)
				attempts := 0
				err := m.DoWith(soon(t), txretry.Options{MaxAttempts: 1, AtBegin: atBegin}, func(ctx context.Context, tx pgx.Tx) error {
					attempts++
					return add(ctx, tx, 1)
				})
				if err != nil || attempts != 1 || proxy.Silenced() != 1 {
					t.Errorf("error %v after %d attempts, %d connections silent", err, attempts, proxy.Silenced())
				}
				wantCounter(t, direct, 2)
			})
		}
	}
}

// A server that never answers BEGIN is reported in time.
func TestSilentServer(t *testing.T) {
	t.Parallel()
	direct, pool, proxy := behindProxy(t, 4, addOne)
	m := newManager(t, pool, txretry.Config{Logger: quiet})
	m.SetWaits(4*time.Second, 2*time.Second)
	proxy.Pause()
	var unavailable *txretry.UnavailableError
	if err := m.Do(soon(t), addOne); !errors.As(err, &unavailable) {
		t.Errorf("error %v, want *UnavailableError", err)
	}
	proxy.Heal()
	testenv.Eventually(t, func() error { return m.Do(soon(t), addOne) })
	wantCounter(t, direct, 5)
}

// Whatever a transaction waits for, a silent server ends it with an error that says so, and the
// next one has another connection.
func TestSilentStatement(t *testing.T) {
	t.Parallel()
	const sql = "select n from counter where id = $1"
	rows := func(ctx context.Context, tx pgx.Tx) error {
		rows, err := tx.Query(ctx, sql, 1)
		if err != nil {
			return err
		}
		_, err = pgx.CollectRows(rows, pgx.RowTo[int])
		return err
	}
	batch := func(ctx context.Context, tx pgx.Tx, read func(pgx.BatchResults) error) error {
		var b pgx.Batch
		b.Queue(sql, 1)
		results := tx.SendBatch(ctx, &b)
		return errors.Join(read(results), results.Close())
	}
	var all sync.WaitGroup
	defer all.Wait()
	for name, work := range map[string]func(ctx context.Context, tx pgx.Tx) error{
		"Exec":        addOne,
		"Query":       rows,
		"Query, rows": func(ctx context.Context, tx pgx.Tx) error { _, err := tx.Query(ctx, sql, 1); return err },
		"QueryRow": func(ctx context.Context, tx pgx.Tx) error {
			var n int
			return tx.QueryRow(ctx, sql, 1).Scan(&n)
		},
		"Prepare": func(ctx context.Context, tx pgx.Tx) error {
			_, err := tx.Prepare(ctx, cached, sql)
			return err
		},
		"batch": func(ctx context.Context, tx pgx.Tx) error {
			return batch(ctx, tx, func(pgx.BatchResults) error { return nil })
		},
		"batch, Exec": func(ctx context.Context, tx pgx.Tx) error {
			return batch(ctx, tx, func(r pgx.BatchResults) error { _, err := r.Exec(); return err })
		},
		"batch, Query": func(ctx context.Context, tx pgx.Tx) error {
			return batch(ctx, tx, func(r pgx.BatchResults) error {
				rows, err := r.Query()
				if err == nil {
					_, err = pgx.CollectRows(rows, pgx.RowTo[int])
				}
				return err
			})
		},
		"batch, QueryRow": func(ctx context.Context, tx pgx.Tx) error {
			return batch(ctx, tx, func(r pgx.BatchResults) error {
				var n int
				return r.QueryRow().Scan(&n)
			})
		},
		"CopyFrom": func(ctx context.Context, tx pgx.Tx) error {
			table := pgx.Identifier{"counter"}
			_, err := tx.CopyFrom(ctx, table, []string{"id", "n"}, pgx.CopyFromRows([][]any{{cached, 0}}))
			return err
		},
		"savepoint": func(ctx context.Context, tx pgx.Tx) error { _, err := tx.Begin(ctx); return err },
	} {
		runAtOnce(t, &all, name, func(t *testing.T) {
			direct, pool, proxy := behindProxy(t, 1, addOne)
			m := newManager(t, pool, txretry.Config{Logger: quiet})
			calls := 0
			err := m.DoWith(soon(t), txretry.Options{StatementTimeout: time.Second}, func(ctx context.Context, tx pgx.Tx) error {
				calls++
				proxy.SilenceOn(testenv.Silence{})
				return work(ctx, tx)
			})
			wantUnavailable(t, err, "fn")
			if !errors.Is(err, driver.ErrSilent) || calls != 1 {
				t.Errorf("error %v after %d calls, want ErrSilent after one", err, calls)
			}
			if err := m.Do(soon(t), func(ctx context.Context, tx pgx.Tx) error { return rows(ctx, tx) }); err != nil {
				t.Errorf("afterwards: %v", err)
			}
			wantCounter(t, direct, 1)
		})
	}
}

// A COMMIT that is not answered in time is unknown, whether it arrived or not; the server can be asked.
func TestSilentCommit(t *testing.T) {
	t.Parallel()
	var all sync.WaitGroup
	defer all.Wait()
	for name, test := range map[string]struct {
		silence testenv.Silence
		applied int // by the attempt that met the silence
	}{
		"request lost": {testenv.Silence{On: "commit"}, 0},
		"answer lost":  {testenv.Silence{On: "commit", Deliver: true}, 1},
	} {
		for kind, ask := range map[string]bool{"": false, ", resolved": true} {
			runAtOnce(t, &all, name+kind, func(t *testing.T) {
				direct, pool, proxy := behindProxy(t, 1, addOne)
				m := newManager(t, pool, txretry.Config{CommitTimeout: 5 * time.Minute, XactStatus: ask, Logger: quiet})
				proxy.SilenceOn(test.silence)
				start := time.Now()
				err := m.DoWith(soon(t), txretry.Options{CommitTimeout: 2 * time.Second}, addOne)
				if took := time.Since(start); took > 2*time.Minute {
					t.Errorf("it took %v", took)
				}
				if !ask {
					wantUnknown(t, err)
					eventuallyCounter(t, direct, 1+test.applied)
					return
				}
				if err != nil {
					t.Error(err)
				}
				wantCounter(t, direct, 2)
			})
		}
	}
}

// Connections that fell silent while nobody used them cost each caller one short wait, not one for
// each connection.
func TestSilentPool(t *testing.T) {
	t.Parallel()
	const conns = 8
	var all sync.WaitGroup
	defer all.Wait()
	for name, pings := range map[string]bool{"pinged by the pool": true, "not pinged": false} {
		for _, callers := range []int{1, conns} {
			runAtOnce(t, &all, fmt.Sprintf("%s, %d callers", name, callers), func(t *testing.T) {
				testenv.InTime(t, 10*time.Second, func() time.Duration {
					m := newManager(t, silentPool(t, conns, pings), txretry.Config{Logger: quiet})
					start := time.Now()
					together(callers, func(id int) {
						err := m.Do(soon(t), func(ctx context.Context, tx pgx.Tx) error { return addTo(ctx, tx, id, 1) })
						if err != nil {
							t.Error(err)
						}
					})
					return time.Since(start)
				})
			})
		}
	}
}

// A caller who leaves before a ping is given up has the idle connections looked at, all of which are silent.
func TestSilentPoolOfTheImpatient(t *testing.T) {
	t.Parallel()
	pool := silentPool(t, 20, true)
	m := newManager(t, pool, txretry.Config{Logger: quiet})
	ctx, leave := context.WithCancel(t.Context())
	defer leave()
	defer time.AfterFunc(1500*time.Millisecond, leave).Stop()
	_ = m.Do(ctx, func(ctx context.Context, tx pgx.Tx) error { return addTo(ctx, tx, 0, 1) }) // it has left
	testenv.Eventually(t, func() error {
		if n := pool.Stat().TotalConns(); n > 0 {
			return fmt.Errorf("%d connections are left", n)
		}
		return nil
	})
}

// silentPool has so many idle connections on which the server is silent. New ones work.
func silentPool(t *testing.T, conns int, pings bool) *pgxpool.Pool {
	t.Helper()
	proxy := testenv.NewProxy(t, newCounter(t).Config().ConnString())
	cfg := proxiedConfig(t, proxy, int32(conns))
	txretry.PreparePool(cfg)
	cfg.ShouldPing = func(context.Context, pgxpool.ShouldPingParams) bool { return pings }
	pool := openPool(t, cfg)
	pgtest.Idle(t, pool, conns)
	proxy.SilenceConnections()
	return pool
}

// Transactions that hang do not stop the others.
func TestSilentTransactionsStopNobody(t *testing.T) {
	t.Parallel()
	const hung = 6
	_, pool, proxy := behindProxy(t, hung+1, addOne)
	m := newManager(t, pool, txretry.Config{Logger: quiet})
	proxy.SilenceOn(testenv.Silence{On: "select 'hang'", Connections: hung})
	var all sync.WaitGroup
	all.Go(func() {
		together(hung, func(int) {
			err := m.DoWith(soon(t), txretry.Options{StatementTimeout: 2 * time.Second}, func(ctx context.Context, tx pgx.Tx) error {
				_, err := tx.Exec(ctx, "select 'hang'")
				return err
			})
			if !errors.Is(err, driver.ErrSilent) {
				t.Errorf("a hung transaction: %v", err)
			}
		})
	})
	testenv.Eventually(t, func() error {
		if n := proxy.Silenced(); n < hung {
			return fmt.Errorf("%d hang", n)
		}
		return nil
	})
	together(hung, func(id int) {
		if err := m.Do(soon(t), func(ctx context.Context, tx pgx.Tx) error { return addTo(ctx, tx, id, 1) }); err != nil {
			t.Errorf("beside them: %v", err)
		}
	})
	all.Wait()
}

// A call that hangs gives up its turn.
func TestSilentTurn(t *testing.T) {
	t.Parallel()
	direct, pool, proxy := behindProxy(t, 2, addOne)
	m := newManager(t, pool, txretry.Config{Logger: quiet})
	proxy.SilenceOn(testenv.Silence{On: "select 'hang'"})
	begun := make(chan struct{})
	var both sync.WaitGroup
	both.Go(func() {
		err := m.DoWith(soon(t), txretry.Options{SerialKey: "k", StatementTimeout: time.Second}, func(ctx context.Context, tx pgx.Tx) error {
			close(begun)
			_, err := tx.Exec(ctx, "select 'hang'")
			return err
		})
		wantUnavailable(t, err, "fn")
	})
	<-begun
	if err := m.DoWith(soon(t), txretry.Options{SerialKey: "k"}, addOne); err != nil {
		t.Errorf("the next in line: %v", err)
	}
	both.Wait()
	wantCounter(t, direct, 3)
}

func together(n int, do func(id int)) {
	var all sync.WaitGroup
	for id := 1; id <= n; id++ {
		all.Go(func() { do(id) })
	}
	all.Wait()
}

func proxiedConfig(t *testing.T, proxy *testenv.Proxy, conns int32) *pgxpool.Config {
	t.Helper()
	cfg, err := pgxpool.ParseConfig(proxy.URL())
	if err != nil {
		t.Fatal(err)
	}
	cfg.MaxConns = conns
	return cfg
}

func openPool(t *testing.T, cfg *pgxpool.Config) *pgxpool.Pool {
	t.Helper()
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	return pool
}

func addTo(ctx context.Context, tx pgx.Tx, id, delta int) error {
	_, err := tx.Exec(ctx, "update counter set n = n + $1 where id = $2", delta, id)
	return err
}

// A pool without a free connection is no deadline of the caller's.
func TestNoConnection(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t, newCounter(t).Config().ConnString(), 1)
	pgtest.Idle(t, pool, 1)
	conn, err := pool.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Release()
	m := newManager(t, pool, txretry.Config{})
	m.SetWaits(100*time.Millisecond, 2*time.Second)
	err = m.Do(t.Context(), func(context.Context, pgx.Tx) error {
		t.Error("fn was run")
		return nil
	})
	wantUnavailable(t, err, "acquire")
	if errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "1 are in use") {
		t.Errorf("error %v", err)
	}
}
