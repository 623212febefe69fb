package txretry_test

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/pgtest"
	"github.com/holdfast-go/holdfast/internal/silent"
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
