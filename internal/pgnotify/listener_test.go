package pgnotify_test

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/pgnotify"
)

// A busy server that once takes seconds to open a connection does not keep Probe from its answer.
func TestProbeOnBusyServer(t *testing.T) {
	t.Parallel()
	pool, c := table(t)
	cfg := pool.Config()
	var opened atomic.Int64
	cfg.BeforeConnect = func(ctx context.Context, _ *pgx.ConnConfig) error {
		if n := opened.Add(1); n < 2 || n > 3 { // these two are for the notification
			return nil
		}
		<-ctx.Done()
		return ctx.Err()
	}
	busy, err := pgxpool.NewWithConfig(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(busy.Close)
	c.Pool = busy
	probed := pgnotify.NewListener(pgnotify.ListenerConfig{
		Channel: c, Wake: func(time.Time) {}, ProbeInterval: time.Minute, Failed: func(context.Context, error) {},
	})
	if err := probed.Probe(t.Context()); err != nil {
		t.Error(err)
	}
	if n := opened.Load(); n < 4 {
		t.Errorf("%d connections were asked for, so none for too long", n)
	}
}
