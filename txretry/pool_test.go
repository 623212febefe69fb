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
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/pgtest"
	"github.com/holdfast-go/holdfast/internal/silent"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/txretry"
)

// Close of a prepared pool does not wait for connections on which the server has fallen silent:
// idle ones, those in a ping that was given up, and those in a statement that was.
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
		if took := time.Since(start); took > 3*time.Second { // 2 s for an answer, and a second for the farewell
			t.Errorf("Close took %v", took)
		}
		if closing.Load() == 0 {
			t.Error("the pool's own BeforeClose was not called")
		}
	})
}

// Connections that fell silent while nobody used them cost each caller one wait of 2 s, not one for each connection.
func TestSilentPool(t *testing.T) {
	t.Parallel()
	const conns = 8
	for _, pings := range []bool{false, true} {
		for _, callers := range []int{1, conns} {
			t.Run(fmt.Sprintf("pinged %v, %d callers", pings, callers), func(t *testing.T) {
				t.Parallel()
				silentServer(t, conns, txretry.Config{}, func(t *testing.T, s *silent.Postgres, _ *pgxpool.Pool, m *txretry.Manager) {
					if pings {
						time.Sleep(2 * time.Second) // the pool pings a connection that was idle for a second
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

// A caller who leaves after half a second, before a ping is given up, has the silent idle connections closed.
func TestSilentPoolOfTheImpatient(t *testing.T) {
	t.Parallel()
	silentServer(t, 20, txretry.Config{}, func(t *testing.T, s *silent.Postgres, _ *pgxpool.Pool, m *txretry.Manager) {
		time.Sleep(2 * time.Second)
		s.SilenceConnections()
		ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
		defer cancel()
		if err := m.Do(ctx, update); err == nil {
			t.Error("a silent connection has answered")
		}
		time.Sleep(3 * time.Second) // 2 s for an answer, and a second for the farewell
		synctest.Wait()
		if n := s.Kept(); n > 0 || s.Silenced() != 20 {
			t.Errorf("%d of %d silent connections are open", n, s.Silenced())
		}
	})
}

// Transactions that hang do not stop the others, and give up their turn.
func TestSilentTransactionsStopNobody(t *testing.T) {
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
				t.Errorf("beside them: %v", err)
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

// A pool without a free connection is no deadline of the caller's.
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
		if errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "2 are in use") {
			t.Errorf("error %v", err)
		}
		silent.Took(t, "the call", start, 30*time.Second)
	})
}
