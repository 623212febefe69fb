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
	_, c := table(t)
	var err error
	for range 3 { // the server may be busy indeed
		if err = probeSlowly(t, c); err == nil {
			return
		}
	}
	t.Error(err)
}

// probeSlowly probes where opening a second connection takes longer than a probe may.
func probeSlowly(t *testing.T, c pgnotify.Channel) error {
	t.Helper()
	cfg := c.Pool.Config()
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
	defer busy.Close()
	c.Pool = busy
	probed := pgnotify.NewListener(pgnotify.ListenerConfig{
		Channel: c, Wake: func(time.Time) {}, ProbeInterval: time.Minute, Failed: func(context.Context, error) {},
	})
	err = probed.Probe(t.Context())
	if n := opened.Load(); err == nil && n < 4 {
		t.Errorf("%d connections were asked for, so none for too long", n)
	}
	return err
}
