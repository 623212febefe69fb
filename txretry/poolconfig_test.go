package txretry_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/pgtest"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/txretry"
)

// Close of a prepared pool does not wait for connections on which the server has fallen silent:
// idle ones, those in a ping that was given up, and those in a statement that was.
func TestPreparedPoolCloses(t *testing.T) {
	t.Parallel()
	const conns = 6
	direct := newCounter(t)
	proxy := testenv.NewProxy(t, direct.Config().ConnString())
	cfg := proxiedConfig(t, proxy, conns)
	cfg.ShouldPing = func(context.Context, pgxpool.ShouldPingParams) bool { return true }
	var closing atomic.Int32
	cfg.BeforeClose = func(*pgx.Conn) { closing.Add(1) }
	txretry.PreparePool(cfg)
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	pgtest.Idle(t, pool, conns)
	m := newManager(t, pool, txretry.Config{Logger: quiet})

	given, giveUp := context.WithCancel(soon(t))
	hung := make(chan error)
	go func() {
		hung <- m.Do(given, func(ctx context.Context, tx pgx.Tx) error {
			proxy.SilenceConnections()
			return add(ctx, tx, 1)
		})
	}()
	pinged := make(chan struct{})
	go func() {
		defer close(pinged)
		for range 3 {
			_ = pool.Ping(given)
		}
	}()
	testenv.Eventually(t, func() error {
		if proxy.Silenced() < conns {
			return errors.New("not yet")
		}
		return nil
	})
	giveUp()
	<-hung
	<-pinged
	start := time.Now()
	pool.Close()
	if took := time.Since(start); took > 10*time.Second {
		t.Errorf("Close took %v", took)
	}
	if closing.Load() == 0 {
		t.Error("the pool's own BeforeClose was not called")
	}
}
