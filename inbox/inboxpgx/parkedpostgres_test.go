package inboxpgx_test

import (
	"context"
	"fmt"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
	"github.com/holdfast-go/holdfast/inbox/inboxtest"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// newYardOnPostgres is a yard whose processes have pools of their own.
func newYardOnPostgres(t *testing.T) *yard {
	t.Helper()
	y := newYard(t)
	y.pool = newPool(t)
	exec(t, y.pool, `CREATE TABLE parked_done (seq bigint GENERATED ALWAYS AS IDENTITY, key text, number int, message_id uuid UNIQUE)`)
	y.manager = newManager(t, y.pool)
	y.entries = newStore(t, y.manager, "a", inboxpgx.Config{}).Entries()
	y.live = y.liveOnPostgres
	return y
}

func (y *yard) liveOnPostgres(ctx context.Context, p *mortal, change func(*inboxtest.Config)) {
	cfg := y.pool.Config()
	cfg.MaxConns = 6
	lines := &mortalLines{process: p}
	dial := cfg.ConnConfig.DialFunc
	cfg.ConnConfig.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
		if p.dead.Load() {
			return nil, errCrashed
		}
		conn, err := dial(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		return lines.add(conn), nil
	}
	pool, err := pgxpool.NewWithConfig(context.WithoutCancel(ctx), cfg)
	if err != nil {
		y.t.Error(err)
		return
	}
	defer pool.Close()
	s := newStore(y.t, newManager(y.t, pool), "a", inboxpgx.Config{})
	s.Hasten(300*time.Millisecond, 50*time.Millisecond)
	y.liveWith(ctx, p, s, func(cfg *inboxtest.Config) {
		change(cfg)
		cfg.ShutdownTimeout = time.Second
	})
}

// mortalLines are the connections of a process. Each packet that one of them sends is a step of the process. The last
// one is sent still if the process says so.
type mortalLines struct {
	process *mortal
	mu      sync.Mutex
	all     []net.Conn
}

func (l *mortalLines) add(conn net.Conn) net.Conn {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.all = append(l.all, conn)
	return mortalLine{conn, l}
}

// cut ends all connections.
func (l *mortalLines) cut() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, conn := range l.all {
		_ = conn.Close()
	}
}

type mortalLine struct {
	net.Conn
	lines *mortalLines
}

func (c mortalLine) Write(packet []byte) (int, error) {
	p := c.lines.process
	if p.dead.Load() {
		return 0, errCrashed
	}
	n := p.steps.Add(1)
	if n != p.at.Load() {
		return c.Conn.Write(packet)
	}
	p.dead.Store(true)
	if p.sends {
		_, _ = c.Conn.Write(packet)
	}
	c.lines.cut()
	return 0, errCrashed
}

// The process may end at each packet that it sends to Postgres, before or after it is sent: see TestParkedKey_throughCrashes.
func TestParkedKey_throughCrashesOnPostgres(t *testing.T) {
	t.Parallel()
	testenv.Nightly(t, "it kills a process at each of some 100 packets")
	for step := range int64(110) {
		for _, sends := range []bool{false, true} {
			t.Run(fmt.Sprintf("packet %d, sent %v", step, sends), func(t *testing.T) {
				t.Parallel()
				y := newYardOnPostgres(t)
				p := &mortal{sends: sends}
				p.at.Store(step + 1)
				y.parkedKeyThroughCrash(p)
			})
		}
	}
}

func TestParkedKeys_throughFaultsOnPostgres(t *testing.T) {
	t.Parallel()
	testenv.Nightly(t, "processes come and go for half a minute")
	for _, batch := range []int{1, 8} {
		t.Run(fmt.Sprint("batch ", batch), func(t *testing.T) {
			t.Parallel()
			newYardOnPostgres(t).throughFaults(batch, 6, 60)
		})
	}
}
