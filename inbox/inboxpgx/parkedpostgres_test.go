package inboxpgx_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
	pgdriver "github.com/holdfast-go/holdfast/inbox/inboxpgx/driver"
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

// blocked waits until so many sessions of the pool's database wait for a lock.
func blocked(t *testing.T, pool *pgxpool.Pool) {
	t.Helper()
	testenv.Eventually(t, func() error {
		var n int
		err := pool.QueryRow(t.Context(), `SELECT count(*) FROM pg_locks l JOIN pg_stat_activity a USING (pid)
			WHERE NOT l.granted AND a.application_name = current_setting('application_name') AND a.query LIKE '%' || current_schema() || '%'`).Scan(&n)
		if err == nil && n == 0 {
			err = errors.New("nobody waits")
		}
		return err
	})
}

// freeKey returns a Parking in which a key has no message left, and its claim.
func freeKey(t *testing.T) (*pgxpool.Pool, pgdriver.Parking, *pgdriver.Head) {
	t.Helper()
	pool := newPool(t)
	schema := ""
	noError(t, pool.QueryRow(t.Context(), `SELECT current_schema()`).Scan(&schema))
	p := newStore(t, newManager(t, pool), "a", inboxpgx.Config{Schema: schema}).Entries().Parking("a")
	noError(t, p.Stop(t.Context(), "k", dead(event())))
	noError(t, p.Scan(t.Context(), "default", func(*inbox.DeadLetter) (driver.Outcome, error) { return driver.Drop, nil }, nil))
	h, err := p.Claim(t.Context(), time.Hour)
	if h == nil || h.Message != nil || err != nil {
		t.Fatalf("%+v, error %v", h, err)
	}
	return pool, p, h
}

// A message is stored, and its transaction is open, while another process finds its key without messages: the key
// stays stopped.
func TestParking_arrivalBesideTheEnd(t *testing.T) {
	t.Parallel()
	pool, p, h := freeKey(t)
	tx, err := pool.Begin(t.Context())
	noError(t, err)
	_, err = tx.Exec(t.Context(), `INSERT INTO holdfast_inbox_waiting (consumer, key, message_id, envelope, body)
		SELECT consumer, key, gen_random_uuid(), '{}', '' FROM holdfast_inbox_stopped WHERE key = 'k' FOR KEY SHARE`)
	noError(t, err)
	ended := make(chan error, 1)
	go func() { ended <- p.Release(context.Background(), h) }()
	blocked(t, pool)
	noError(t, tx.Commit(t.Context()))
	noError(t, <-ended)
	if h, err := p.Claim(t.Context(), time.Hour); h == nil || h.Message == nil || err != nil {
		t.Errorf("the key goes on with %+v, error %v", h, err)
	}
}

// A key becomes free while a message arrives that has seen it stopped: the message is told so.
func TestParking_endBesideAnArrival(t *testing.T) {
	t.Parallel()
	for _, commits := range []bool{true, false} {
		pool, p, _ := freeKey(t)
		tx, err := pool.Begin(t.Context())
		noError(t, err)
		_, err = tx.Exec(t.Context(), `DELETE FROM holdfast_inbox_stopped`)
		noError(t, err)
		type answer struct {
			waits bool
			err   error
		}
		answers := make(chan answer, 1)
		go func() {
			waits, err := p.Wait(context.Background(), "k", event())
			answers <- answer{waits, err}
		}()
		blocked(t, pool)
		if commits {
			noError(t, tx.Commit(t.Context()))
		} else {
			noError(t, tx.Rollback(t.Context()))
		}
		if got := <-answers; got.waits == commits || got.err != nil {
			t.Errorf("committed %v: %+v", commits, got)
		}
	}
}

// Messages of different keys do not conflict, whatever the planner thinks of tables with few rows.
func TestParkedMessages_doNotConflict(t *testing.T) {
	t.Parallel()
	y := newYardOnPostgres(t)
	cfg := y.pool.Config()
	cfg.ConnConfig.RuntimeParams["enable_indexscan"], cfg.ConnConfig.RuntimeParams["enable_bitmapscan"] = "off", "off"
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	noError(t, err)
	t.Cleanup(pool.Close)
	y.manager = newManager(t, pool)
	var runs atomic.Int32
	var all sync.WaitGroup
	all.Add(4)
	y.fail = func(context.Context, *inbox.Message) error { // the first four run at the same time
		if runs.Add(1) <= 4 {
			all.Done()
			all.Wait()
		}
		return nil
	}
	for k := range 4 {
		y.stopped(fmt.Sprint("k", k), 1, 2, 3)
	}
	y.replay(inbox.Filter{})
	y.run(nil)
	testenv.Eventually(t, func() error {
		if keys, _ := y.waiting(); keys > 0 {
			return fmt.Errorf("%d keys are left", keys)
		}
		return nil
	})
	if runs.Load() != 12 {
		t.Errorf("12 messages ran %d times", runs.Load())
	}
}

// A handler whose statement takes longer than HandlerTimeout fails, and its message has one attempt less: the outcome
// waits until the server has ended the statement.
func TestParkedMessage_statementTakesTooLong(t *testing.T) {
	t.Parallel()
	y := newYardOnPostgres(t)
	y.hangs = true
	y.stopped("k", 1, 2)
	y.replay(inbox.Filter{})
	y.run(func(cfg *inboxtest.Config) { cfg.HandlerTimeout, cfg.Retry.MaxAttempts = 500*time.Millisecond, 2 })
	testenv.Eventually(t, func() error {
		found, err := y.letters().List(context.Background(), inbox.Filter{})
		if err == nil && (len(found) != 1 || found[0].Class != driver.ClassDefault || found[0].Message.Attempt != 2) {
			err = fmt.Errorf("%+v", found)
		}
		return err
	})
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
