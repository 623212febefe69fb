package inboxpgx_test

import (
	"context"
	"net"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/txretry"
)

// countingConn counts what is sent.
type countingConn struct {
	net.Conn
	sent *atomic.Int64
}

func (c countingConn) Write(p []byte) (int, error) {
	c.sent.Add(1)
	return c.Conn.Write(p)
}

// A message costs the round trips of its handler, one for BEGIN with the entry, and COMMIT.
func TestRoundTrips(t *testing.T) {
	t.Parallel()
	cfg := newPool(t).Config()
	var sent atomic.Int64
	dial := cfg.ConnConfig.DialFunc
	cfg.ConnConfig.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
		conn, err := dial(ctx, network, addr)
		return countingConn{conn, &sent}, err
	}
	cfg.MaxConns = 1
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	p := effectStore(t, newManager(t, pool))
	for _, want := range []int64{0, 3} { // the first message prepares the statements
		sent.Store(0)
		if err := process(t, p, event()); err != nil {
			t.Fatal(err)
		}
		if got := sent.Load(); want != 0 && got != want {
			t.Errorf("%d round trips for a message, want %d", got, want)
		}
	}
	m := event()
	if err := process(t, p, m); err != nil {
		t.Fatal(err)
	}
	sent.Store(0)
	if err := process(t, p, m); err != nil || sent.Load() != 2 {
		t.Errorf("%d round trips for a duplicate, want 2: error %v", sent.Load(), err)
	}
}

// plain is a Transactor that knows no Options, and whose handles nobody recognises.
type plain struct{ txretry.Transactor }

func (p plain) Pool() *pgxpool.Pool { return poolOf(p.Transactor) }

func poolOf(t txretry.Transactor) *pgxpool.Pool { return t.(*txretry.Manager).Pool() }

func (p plain) DoWith(ctx context.Context, _ txretry.Options, fn func(ctx context.Context, tx pgx.Tx) error) error {
	return p.Do(ctx, func(ctx context.Context, tx pgx.Tx) error { return fn(ctx, struct{ pgx.Tx }{tx}) })
}

// wrapped passes the Options on, and wraps the handles.
type wrapped struct{ txretry.Transactor }

func (w wrapped) Pool() *pgxpool.Pool { return poolOf(w.Transactor) }

func (w wrapped) DoWith(ctx context.Context, opts txretry.Options, fn func(ctx context.Context, tx pgx.Tx) error) error {
	return w.Transactor.DoWith(ctx, opts, func(ctx context.Context, tx pgx.Tx) error { return fn(ctx, struct{ pgx.Tx }{tx}) })
}

// Under any Transactor a message is recorded once, and its first delivery is no duplicate.
func TestForeignTransactors(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	manager := newManager(t, pool)
	for n, transactor := range []txretry.Transactor{plain{manager}, wrapped{manager}} {
		p := effectStore(t, transactor)
		m := event()
		for range 2 {
			if err := process(t, p, m); err != nil {
				t.Fatal(err)
			}
		}
		wantOneEffectEach(t, pool, n+1)
	}
}
