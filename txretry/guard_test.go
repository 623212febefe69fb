package txretry_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgproto3"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/silent"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/pgtest"
	"github.com/holdfast-go/holdfast/txretry"
	"github.com/holdfast-go/holdfast/txretry/driver"
)

// silentServer runs a test in a bubble, with a manager on a prepared pool of idle connections. The pool has room for
// as many again, because a closed connection keeps its place for a second. Times are virtual.
func silentServer(t *testing.T, conns int, cfg txretry.Config, test func(t *testing.T, s *silent.Postgres, pool *pgxpool.Pool, m *txretry.Manager)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		s := silent.NewPostgres(t, "")
		poolConfig := s.Config(t, 2*conns)
		txretry.PreparePool(poolConfig)
		pool := s.Open(t, poolConfig)
		cfg.Logger, cfg.Rand = quiet, func() float64 { return 0 }
		m := newManager(t, pool, cfg)
		pgtest.Idle(t, pool, conns)
		test(t, s, pool, m)
	})
}

func update(ctx context.Context, tx pgx.Tx) error {
	_, err := tx.Exec(ctx, "update counter")
	return err
}

// BEGIN has no effect: it is sent again on another connection after 2 s, and the call succeeds.
func TestSilentBegin(t *testing.T) {
	t.Parallel()
	for _, deliver := range []bool{false, true} {
		for kind, atBegin := range map[string]driver.Statement{"alone": {}, "with AtBegin": {SQL: "select 1"}} {
			t.Run(fmt.Sprintf("%s, delivered %v", kind, deliver), func(t *testing.T) {
				t.Parallel()
				silentServer(t, 1, txretry.Config{}, func(t *testing.T, s *silent.Postgres, _ *pgxpool.Pool, m *txretry.Manager) {
					s.SilenceOn(testenv.Silence{On: "begin", Deliver: deliver})
					start, attempts := time.Now(), 0
					err := m.DoWith(t.Context(), txretry.Options{MaxAttempts: 1, AtBegin: atBegin}, func(ctx context.Context, tx pgx.Tx) error {
						attempts++
						return update(ctx, tx)
					})
					if err != nil || attempts != 1 || s.Silenced() != 1 || s.Effects() != 1 {
						t.Errorf("error %v after %d attempts, %d connections silent, %d effects", err, attempts, s.Silenced(), s.Effects())
					}
					silent.Took(t, "the call", start, 2*time.Second)
				})
			})
		}
	}
}

// If the whole server is silent, Do returns an error within the time limits of BEGIN and of a new connection. It
// works again as soon as the server is back.
func TestSilentServer(t *testing.T) {
	t.Parallel()
	silentServer(t, 4, txretry.Config{}, func(t *testing.T, s *silent.Postgres, _ *pgxpool.Pool, m *txretry.Manager) {
		s.Pause()
		start := time.Now()
		wantUnavailable(t, m.Do(t.Context(), update), "acquire")
		if took := time.Since(start); took > 11*time.Second { // 2 s for BEGIN, 2 times 2 s for idle connections, 5 s to connect
			t.Errorf("took %v", took)
		}
		s.Heal()
		start = time.Now()
		if err := m.Do(t.Context(), update); err != nil || s.Effects() != 1 {
			t.Errorf("back again: error %v, %d effects", err, s.Effects())
		}
		silent.Took(t, "the call", start, 0)
	})
}

// In every wait of a transaction, a silent server causes ErrSilent after its timeout and a second. The next
// transaction gets another connection.
func TestSilentStatement(t *testing.T) {
	t.Parallel()
	const sql = "select n from counter where id = $1"
	batch := func(ctx context.Context, tx pgx.Tx, read func(pgx.BatchResults) error) error {
		var b pgx.Batch
		b.Queue(sql, 1)
		results := tx.SendBatch(ctx, &b)
		return errors.Join(read(results), results.Close())
	}
	for name, work := range map[string]func(ctx context.Context, tx pgx.Tx) error{
		"Exec":  update,
		"Query": func(ctx context.Context, tx pgx.Tx) error { _, err := tx.Query(ctx, sql, 1); return err },
		"Query, rows": func(ctx context.Context, tx pgx.Tx) error {
			rows, err := tx.Query(ctx, sql, 1)
			if err == nil {
				_, err = pgx.CollectRows(rows, pgx.RowTo[int])
			}
			return err
		},
		"QueryRow": func(ctx context.Context, tx pgx.Tx) error { return tx.QueryRow(ctx, sql, 1).Scan(new(int)) },
		"Prepare":  func(ctx context.Context, tx pgx.Tx) error { _, err := tx.Prepare(ctx, "name", sql); return err },
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
			return batch(ctx, tx, func(r pgx.BatchResults) error { return r.QueryRow().Scan(new(int)) })
		},
		"CopyFrom": func(ctx context.Context, tx pgx.Tx) error {
			_, err := tx.CopyFrom(ctx, pgx.Identifier{"counter"}, []string{"id", "n"}, pgx.CopyFromRows([][]any{{1, 0}}))
			return err
		},
		"savepoint": func(ctx context.Context, tx pgx.Tx) error { _, err := tx.Begin(ctx); return err },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			silentServer(t, 1, txretry.Config{}, func(t *testing.T, s *silent.Postgres, _ *pgxpool.Pool, m *txretry.Manager) {
				start, calls := time.Now(), 0
				err := m.DoWith(t.Context(), txretry.Options{StatementTimeout: 5 * time.Second}, func(ctx context.Context, tx pgx.Tx) error {
					calls++
					s.SilenceOn(testenv.Silence{})
					return work(ctx, tx)
				})
				wantUnavailable(t, err, "fn")
				if !errors.Is(err, driver.ErrSilent) || calls != 1 {
					t.Errorf("error %v after %d calls, want ErrSilent after one", err, calls)
				}
				silent.Took(t, "the call", start, 6*time.Second)
				start = time.Now()
				if err := m.Do(t.Context(), update); err != nil || s.Effects() != 1 {
					t.Errorf("afterwards: %v, %d effects", err, s.Effects())
				}
				silent.Took(t, "the call", start, 0)
			})
		})
	}
}

// If a COMMIT gets no reply in time, its outcome is unknown, whether it arrived or not, unless the manager finds the
// outcome.
func TestSilentCommit(t *testing.T) {
	t.Parallel()
	for _, deliver := range []bool{false, true} {
		for _, ask := range []bool{false, true} {
			t.Run(fmt.Sprintf("delivered %v, resolved %v", deliver, ask), func(t *testing.T) {
				t.Parallel()
				silentServer(t, 1, txretry.Config{XactStatus: ask}, func(t *testing.T, s *silent.Postgres, _ *pgxpool.Pool, m *txretry.Manager) {
					s.Answer = func(sql string) (string, *pgproto3.ErrorResponse) {
						switch {
						case strings.Contains(sql, "pg_xact_status") && deliver:
							return "committed,t", nil
						case strings.Contains(sql, "pg_xact_status"):
							return "aborted,t", nil
						case strings.Contains(sql, "pg_current_xact_id"):
							return "7", nil
						}
						return "", nil
					}
					s.SilenceOn(testenv.Silence{On: "commit", Deliver: deliver})
					start, want := time.Now(), 1
					err := m.DoWith(t.Context(), txretry.Options{CommitTimeout: 3 * time.Second}, update)
					if ask && !deliver {
						silent.Took(t, "the call", start, 3*time.Second+50*time.Millisecond) // and a pause before the retry
					} else {
						silent.Took(t, "the call", start, 3*time.Second)
					}
					if ask {
						if err != nil {
							t.Error(err)
						}
					} else if wantUnknown(t, err); !deliver {
						want = 0
					}
					if got := s.Effects(); got != want {
						t.Errorf("%d effects, want %d", got, want)
					}
				})
			})
		}
	}
}

// The connection ends during the reply to COMMIT. The tag of COMMIT counts as the reply, even if nothing follows it.
func TestHangUpDuringCommit(t *testing.T) {
	t.Parallel()
	// A pooler may keep its client when the server's connection breaks: it sends an ordinary error, and continues.
	const poolerLostServer = "E\x00\x00\x00\x27SERROR\x00VERROR\x00C08006\x00Mserver lost\x00\x00Z\x00\x00\x00\x05I"
	const readyForQuery = 6 // bytes
	for name, test := range map[string]struct {
		part  func(answer []byte) []byte
		known bool
	}{
		"nothing arrives":  {func([]byte) []byte { return nil }, false},
		"a part arrives":   {func(b []byte) []byte { return b[:4] }, false},
		"a pooler answers": {func([]byte) []byte { return []byte(poolerLostServer) }, false},
		"the tag arrives":  {func(b []byte) []byte { return b[:len(b)-readyForQuery] }, true},
	} {
		for kind, work := range map[string]func(ctx context.Context, tx pgx.Tx) error{
			"": update,
			", with AtCommit": func(_ context.Context, tx pgx.Tx) error {
				txretry.AtCommit(tx, "update counter")
				return nil
			},
		} {
			t.Run(name+kind, func(t *testing.T) {
				t.Parallel()
				silentServer(t, 1, txretry.Config{}, func(t *testing.T, s *silent.Postgres, _ *pgxpool.Pool, m *txretry.Manager) {
					s.Hangup = test.part
					committed := false
					err := m.Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
						txretry.AfterCommit(tx, func() { committed = true })
						return work(ctx, tx)
					})
					if test.known != (err == nil) || test.known != committed || s.Effects() != 1 {
						t.Errorf("error %v, AfterCommit ran: %v, %d effects", err, committed, s.Effects())
					}
					if !test.known {
						wantUnknown(t, err)
					}
				})
			})
		}
	}
}

// A real server on a real connection is silent: the transaction takes effect once.
func TestSilentConnection_onPostgres(t *testing.T) {
	t.Parallel()
	direct, pool, proxy := behindProxy(t, 2, addOne)
	m := newManager(t, pool, txretry.Config{XactStatus: true, Logger: quiet})
	m.SetWaits(time.Minute, 300*time.Millisecond)
	for n, on := range []string{"begin", "commit"} {
		proxy.SilenceOn(testenv.Silence{On: on, Deliver: true})
		if err := m.DoWith(t.Context(), txretry.Options{CommitTimeout: 100 * time.Millisecond}, addOne); err != nil || proxy.Silenced() != n+1 {
			t.Errorf("%s: error %v, %d connections silent", on, err, proxy.Silenced())
		}
	}
	wantCounter(t, direct, 4)
}

// Close of a prepared pool does not wait for silent connections: idle ones, those whose ping was given up, and those
// whose statement was given up.
func TestPreparedPoolCloses(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const conns = 6
		s := silent.NewPostgres(t, "")
		cfg := s.Config(t, conns)
		cfg.ShouldPing = func(context.Context, pgxpool.ShouldPingParams) bool { return true }
		var closing atomic.Int32
		cfg.BeforeClose = func(*pgx.Conn) { closing.Add(1) }
		txretry.PreparePool(cfg)
		pool := s.Open(t, cfg)
		pgtest.Idle(t, pool, conns)
		m := newManager(t, pool, txretry.Config{Logger: quiet})
		given, giveUp := context.WithCancel(t.Context())
		var calls sync.WaitGroup
		calls.Go(func() {
			_ = m.Do(given, func(ctx context.Context, tx pgx.Tx) error {
				s.SilenceConnections()
				return update(ctx, tx)
			})
		})
		synctest.Wait()
		for range 3 {
			calls.Go(func() { _ = pool.Ping(given) })
		}
		synctest.Wait()
		giveUp()
		calls.Wait()
		start := time.Now()
		pool.Close()
		if took := time.Since(start); took > 3*time.Second { // 2 s for a reply, and a second for the goodbye
			t.Errorf("Close took %v", took)
		}
		if closing.Load() == 0 {
			t.Error("the pool's own BeforeClose was not called")
		}
	})
}

// Idle connections that became silent cost each caller one wait of 2 s, not one wait per connection.
func TestSilentPool(t *testing.T) {
	t.Parallel()
	const conns = 8
	for _, pings := range []bool{false, true} {
		for _, callers := range []int{1, conns} {
			t.Run(fmt.Sprintf("pinged %v, %d callers", pings, callers), func(t *testing.T) {
				t.Parallel()
				silentServer(t, conns, txretry.Config{}, func(t *testing.T, s *silent.Postgres, _ *pgxpool.Pool, m *txretry.Manager) {
					if pings {
						time.Sleep(2 * time.Second) // the pool pings connections that were idle for a second
					}
					s.SilenceConnections()
					start := time.Now()
					together(callers, func() {
						if err := m.Do(t.Context(), update); err != nil {
							t.Error(err)
						}
						silent.Took(t, "the call", start, 2*time.Second)
					})
				})
			})
		}
	}
}

// If a caller leaves after half a second, before the ping times out, the silent idle connections are closed.
func TestSilentPool_closedWhenCallerLeaves(t *testing.T) {
	t.Parallel()
	silentServer(t, 20, txretry.Config{}, func(t *testing.T, s *silent.Postgres, _ *pgxpool.Pool, m *txretry.Manager) {
		time.Sleep(2 * time.Second)
		s.SilenceConnections()
		ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
		defer cancel()
		if err := m.Do(ctx, update); err == nil {
			t.Error("a silent connection answered")
		}
		time.Sleep(3 * time.Second) // 2 s for a reply, and a second for the goodbye
		synctest.Wait()
		if n := s.Kept(); n > 0 || s.Silenced() != 20 {
			t.Errorf("%d of %d silent connections are open", n, s.Silenced())
		}
	})
}

// Transactions that hang do not block the others, and pass their turn on.
func TestSilentTransactions_doNotBlockOthers(t *testing.T) {
	t.Parallel()
	const hung = 6
	silentServer(t, hung+1, txretry.Config{}, func(t *testing.T, s *silent.Postgres, _ *pgxpool.Pool, m *txretry.Manager) {
		s.SilenceOn(testenv.Silence{On: "select 'hang'", Connections: hung})
		start := time.Now()
		var all sync.WaitGroup
		for n := range hung {
			all.Go(func() {
				opts := txretry.Options{StatementTimeout: 2 * time.Second}
				if n == 0 {
					opts.SerialKey = "k"
				}
				err := m.DoWith(t.Context(), opts, func(ctx context.Context, tx pgx.Tx) error {
					_, err := tx.Exec(ctx, "select 'hang'")
					return err
				})
				wantUnavailable(t, err, "fn")
				silent.Took(t, "the call", start, 3*time.Second)
			})
		}
		synctest.Wait()
		together(hung, func() {
			if err := m.Do(t.Context(), update); err != nil {
				t.Errorf("another transaction: %v", err)
			}
			silent.Took(t, "the call", start, 0)
		})
		if err := m.DoWith(t.Context(), txretry.Options{SerialKey: "k"}, update); err != nil {
			t.Errorf("the next in line: %v", err)
		}
		silent.Took(t, "the call", start, 3*time.Second)
		all.Wait()
	})
}

func together(n int, do func()) {
	var all sync.WaitGroup
	for range n {
		all.Go(do)
	}
	all.Wait()
}

// A pool without a free connection does not return the error of the caller's deadline.
func TestNoConnection(t *testing.T) {
	t.Parallel()
	silentServer(t, 1, txretry.Config{}, func(t *testing.T, _ *silent.Postgres, pool *pgxpool.Pool, m *txretry.Manager) {
		for range pool.Config().MaxConns {
			conn, err := pool.Acquire(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Release()
		}
		start := time.Now()
		err := m.Do(t.Context(), func(context.Context, pgx.Tx) error {
			t.Error("fn was run")
			return nil
		})
		wantUnavailable(t, err, "acquire")
		if errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "in use 2") {
			t.Errorf("error %v", err)
		}
		silent.Took(t, "the call", start, 30*time.Second)
	})
}
