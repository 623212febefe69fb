package inboxpgx_test

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
	"github.com/holdfast-go/holdfast/internal/ids"
	"github.com/holdfast-go/holdfast/internal/pgtest"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// behindProxy returns a pool with all its connections open and idle.
func behindProxy(t *testing.T) (*pgxpool.Pool, *testenv.Proxy) {
	t.Helper()
	const conns = 4
	proxy := testenv.NewProxy(t, pgtest.URL(t))
	pool := pgtest.Pool(t, proxy.URL(), conns)
	createTables(t, pool)
	pgtest.Idle(t, pool, conns)
	return pool, proxy
}

// Each wait for a database that has fallen silent ends by itself, and what is repeated after it
// works, on another connection.
func TestSilentConnections(t *testing.T) {
	t.Parallel()
	pgtest.URL(t) // skips before there are subtests
	for name, call := range map[string]func(ctx context.Context, p *inboxpgx.Store) error{
		"look": func(ctx context.Context, p *inboxpgx.Store) error {
			_, err := p.Ledger().Look(ctx, ids.New())
			return err
		},
		"start": func(ctx context.Context, p *inboxpgx.Store) error { return p.Ledger().Start(ctx, event()) },
		"pass":  func(ctx context.Context, p *inboxpgx.Store) error { return p.Ledger().Pass(ctx, event()) },
		"prune": func(ctx context.Context, p *inboxpgx.Store) error { _, err := p.Prune(ctx); return err },
		"check": func(ctx context.Context, p *inboxpgx.Store) error { return p.Check(ctx) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool, proxy := behindProxy(t)
			p := newStore(t, newManager(t, pool), "a", inboxpgx.Config{})
			proxy.SilenceConnections()
			began := time.Now()
			ended := make(chan error, 1)
			testenv.Eventually(t, func() error {
				go func() { ended <- call(context.WithoutCancel(t.Context()), p) }()
				select {
				case err := <-ended:
					return err
				case <-time.After(testenv.Patience):
					t.Fatal("the call does not end")
					return nil
				}
			})
			t.Logf("%.1f s", time.Since(began).Seconds())
		})
	}
}

// A connection falls silent in the middle of a message's transaction: the message is nobody's
// failure, comes again, and takes effect once.
func TestSilentTransaction(t *testing.T) {
	t.Parallel()
	pgtest.URL(t) // skips before there are subtests
	for name, silence := range map[string]testenv.Silence{
		"begin":                    {On: "begin"},
		"begin, which arrives":     {On: "begin", Deliver: true},
		"statement":                {On: "INSERT INTO effects"},
		"statement, which arrives": {On: "INSERT INTO effects", Deliver: true},
		"commit":                   {On: "commit"},
		"commit, which arrives":    {On: "commit", Deliver: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool, proxy := behindProxy(t)
			p := effectStore(t, newManager(t, pool))
			proxy.SilenceOn(silence)
			m := event()
			began := time.Now()
			var unavailable atomic.Int64
			testenv.Eventually(t, func() error {
				if deliver(t, p, m, &unavailable) {
					return nil
				}
				return fmt.Errorf("not processed after %d tries", unavailable.Load())
			})
			t.Logf("%.1f s, %d connections fell silent", time.Since(began).Seconds(), proxy.Silenced())
			proxy.Heal() // the server rolls back what the client has left open
			if err := p.Process(t.Context(), []*inbox.Message{m})[0]; err != nil {
				t.Error(err)
			}
			wantOneEffectEach(t, pool, 1)
		})
	}
}
