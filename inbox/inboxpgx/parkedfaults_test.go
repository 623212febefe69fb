package inboxpgx_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
	pgdriver "github.com/holdfast-go/holdfast/inbox/inboxpgx/driver"
	"github.com/holdfast-go/holdfast/inbox/inboxtest"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/txretry"
)

// mortal is a process that dies at one of its steps, without a result: nothing that it does later takes
// effect. That leaves the same state as a death before the next step.
type mortal struct {
	at, steps atomic.Int64 // the step at which it dies, and how many it has taken
	rate      atomic.Int32 // per mille of the steps that fail, before or after they took effect
	dead      atomic.Bool
	sends     bool // on Postgres: the packet at which it dies is still sent
}

var errCrashed = errors.New("crashed")

// step performs a step with the effect call.
func (p *mortal) step(call func() error) error {
	if p.dead.Load() {
		return errCrashed
	}
	n, rate := rand.Int32N(2000), p.rate.Load()
	if n < rate {
		return errCrashed
	}
	if rate > 0 {
		time.Sleep(rand.N(30 * time.Millisecond))
	}
	if p.steps.Add(1) != p.at.Load() {
		err := call()
		if n >= 2000-rate {
			return errCrashed
		}
		return err
	}
	p.dead.Store(true)
	_ = call()
	return errCrashed
}

// fault makes an acknowledgement of the queue a step.
func (p *mortal) fault(at inboxtest.Step, _ *inbox.Message) inboxtest.Outcome {
	switch {
	case p.dead.Load():
		return inboxtest.FailBefore
	case p.rate.Load() > 0 && rand.Int32N(3000) < p.rate.Load():
		return []inboxtest.Outcome{inboxtest.FailBefore, inboxtest.FailAfter, inboxtest.EndSession}[rand.N(3)]
	case at != inboxtest.AtAck || p.steps.Add(1) != p.at.Load():
		return inboxtest.OK
	}
	p.dead.Store(true)
	return inboxtest.FailAfter
}

// mortalManager makes each transaction a step.
type mortalManager struct {
	txretry.Transactor
	process *mortal
}

func (m mortalManager) DoWith(ctx context.Context, opts txretry.Options, fn func(context.Context, pgx.Tx) error) (err error) {
	ended := m.process.step(func() error {
		err = m.Transactor.DoWith(ctx, opts, fn)
		return nil
	})
	if ended != nil {
		return inbox.Unavailable(ended)
	}
	return err
}

// mortalEntries makes each call of its Parking a step, except reads.
type mortalEntries struct {
	pgdriver.Entries
	process *mortal
}

func (e mortalEntries) Parking(consumer string) pgdriver.Parking {
	return mortalParking{e.Entries.Parking(consumer), e.process}
}

type mortalParking struct {
	pgdriver.Parking
	process *mortal
}

func (p mortalParking) Stop(ctx context.Context, key string, dead inbox.DeadLetter) error {
	return p.process.step(func() error { return p.Parking.Stop(ctx, key, dead) })
}

func (p mortalParking) Wait(ctx context.Context, key string, m *inbox.Message, full bool) (waits bool, err error) {
	return waits, p.process.step(func() error {
		waits, err = p.Parking.Wait(ctx, key, m, full)
		return err
	})
}

// Claim implements driver.Parking. A claim that finds nothing is not a step: the number of those depends on
// the time.
func (p mortalParking) Claim(ctx context.Context, lease time.Duration) (*pgdriver.Head, error) {
	if p.process.dead.Load() {
		return nil, errCrashed
	}
	h, err := p.Parking.Claim(ctx, lease)
	if h == nil || err != nil {
		return nil, err
	}
	return h, p.process.step(func() error { return nil })
}

func (p mortalParking) Next(ctx context.Context, h *pgdriver.Head, lease time.Duration) (next *pgdriver.Head, err error) {
	err = p.process.step(func() error {
		next, err = p.Parking.Next(ctx, h, lease)
		return err
	})
	if err != nil {
		return nil, err
	}
	return next, nil
}

func (p mortalParking) Retry(ctx context.Context, h *pgdriver.Head, next *inbox.Message, delay time.Duration) error {
	return p.process.step(func() error { return p.Parking.Retry(ctx, h, next, delay) })
}

func (p mortalParking) Fail(ctx context.Context, h *pgdriver.Head, dead inbox.DeadLetter) error {
	return p.process.step(func() error { return p.Parking.Fail(ctx, h, dead) })
}

func (p mortalParking) Release(ctx context.Context, h *pgdriver.Head) error {
	return p.process.step(func() error { return p.Parking.Release(ctx, h) })
}

func (y *yard) liveInMemory(ctx context.Context, p *mortal, change func(*inbox.ConsumerConfig)) {
	y.liveWith(ctx, p, newStore(y.t, mortalManager{y.manager, p}, "a", inboxpgx.Config{Entries: mortalEntries{y.entries, p}}), change)
}

// liveWith runs a process until it dies or ctx ends.
func (y *yard) liveWith(ctx context.Context, p *mortal, s *inboxpgx.Store, change func(*inbox.ConsumerConfig)) {
	handle(y.t, s, y.handle)
	c := y.consumer(s, p.fault, func(cfg *inbox.ConsumerConfig) {
		cfg.ShutdownTimeout = 10 * time.Second
		change(cfg)
	})
	ctx, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	running.Go(func() {
		defer cancel()
		if err := c.Run(ctx); err != nil {
			y.t.Error(err)
		}
	})
	for ctx.Err() == nil && !p.dead.Load() {
		time.Sleep(5 * time.Millisecond)
	}
	cancel() // a dead process does not drain
	running.Wait()
}

// The process may die between any two steps of parking and resuming a key: each message takes effect once, in
// the order of the key.
func TestParkedKey_throughCrashes(t *testing.T) {
	t.Parallel()
	for step := range int64(36) {
		t.Run(fmt.Sprint("step ", step), func(t *testing.T) {
			inYard(t, func(t *testing.T, y *yard) {
				p := &mortal{}
				p.at.Store(step + 1)
				y.parkedKeyThroughCrash(p)
			})
		})
	}
}

func (y *yard) parkedKeyThroughCrash(first *mortal) {
	y.t.Helper()
	fixed := y.failsUntil("k", 1)
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() {
		for p := first; ctx.Err() == nil; p = new(mortal) {
			y.live(ctx, p, func(*inbox.ConsumerConfig) {})
		}
	})
	defer running.Wait()
	defer cancel()
	await := func(what string, holds func() bool) {
		y.t.Helper()
		for began := time.Now(); !holds(); time.Sleep(100 * time.Millisecond) {
			if time.Since(began) > time.Hour {
				y.t.Fatalf("not within an hour: %s", what)
			}
		}
	}
	y.put("k", 1, 2, 3)
	await("three messages wait", func() bool { _, n := y.waiting(); return n == 3 })
	fixed.Store(true)
	await("the letter is replayed", func() bool { return y.replay(inbox.Filter{}) == 1 })
	y.put("k", 4)
	await("all is done", func() bool { return len(y.orderOf("k")) == 4 })
	y.put("k", 5)
	await("the key is free", func() bool { return len(y.orderOf("k")) == 5 })
	await("nothing is left", func() bool { keys, n := y.waiting(); return keys+n == 0 })
	y.wantOrder("k", 1, 2, 3, 4, 5)
	y.t.Logf("%d steps", first.steps.Load())
}

// Keys are parked and resumed while processes start and die, sessions are lost, calls fail before or after
// they took effect, and operators replay and remove. Every message takes effect once or is removed, and no
// key is out of order.
func TestParkedKeys_throughFaults(t *testing.T) {
	t.Parallel()
	for _, batch := range []int{1, 8} {
		t.Run(fmt.Sprint("batch ", batch), func(t *testing.T) {
			inYard(t, func(t *testing.T, y *yard) { y.throughFaults(batch, 12, 60) })
		})
	}
}

func (y *yard) throughFaults(batch, keys, each int) {
	const processes = 3
	t := y.t
	var rate atomic.Int32
	rate.Store(60)
	y.fail = func(context.Context, *inbox.Message) error {
		time.Sleep(rand.N(2 * time.Millisecond)) // one transaction runs at a time
		switch n := rand.Int32N(1000); {
		case n < rate.Load():
			return inbox.Unrecoverable(errBroken)
		case n < 2*rate.Load():
			return errBroken
		}
		return nil
	}
	ctx, cancel := context.WithCancel(context.Background())
	var all sync.WaitGroup
	for range processes {
		all.Go(func() {
			for ctx.Err() == nil { // each lives for some seconds, and some die
				p := &mortal{}
				p.rate.Store(rate.Load())
				if rand.N(2) == 0 && rate.Load() > 0 {
					p.at.Store(rand.Int64N(300))
				}
				y.live(ctx, p, func(cfg *inbox.ConsumerConfig) {
					cfg.Concurrency, cfg.Batch, cfg.Prefetch, cfg.MaxParked = 4, batch, 50, 20+rand.IntN(200)
					cfg.TimeLimit = 3*time.Second + rand.N(20*time.Second)
				})
			}
		})
	}
	all.Go(func() {
		for ctx.Err() == nil {
			time.Sleep(rand.N(3 * time.Second))
			y.operate()
		}
	})
	for n := range each {
		for k := range keys {
			y.put(fmt.Sprint("k", k), n)
		}
		time.Sleep(rand.N(200 * time.Millisecond))
	}
	if y.pool == nil {
		time.Sleep(time.Minute)
	}
	rate.Store(0)
	y.idle()
	for began := time.Now(); ; time.Sleep(time.Second) {
		y.replay(inbox.Filter{})
		keys, messages := y.waiting()
		if keys+messages+y.count() == 0 {
			break
		}
		if time.Since(began) > time.Hour {
			t.Fatalf("%d keys, %d messages, %d letters are left", keys, messages, y.count())
		}
	}
	y.idle()
	cancel()
	all.Wait()
	y.load()
	for k := range keys {
		if got := y.order[fmt.Sprint("k", k)]; !slices.IsSorted(got) || len(slices.Compact(slices.Clone(got))) != len(got) {
			t.Errorf("key %d out of order, or twice: %v", k, got)
		}
	}
	for id, n := range y.number {
		if !y.done[id] && !y.removed[id] {
			t.Errorf("message %d is lost", n)
		}
	}
	t.Logf("%d of %d messages were removed", len(y.removed), len(y.number))
}

// operate replays the dead letters, or removes one.
func (y *yard) operate() {
	if rand.N(4) > 0 {
		_, _ = y.letters().Replay(context.Background(), inbox.Filter{Limit: rand.N(10)}, inbox.Replay{By: "test"})
		return
	}
	found, err := y.letters().List(context.Background(), inbox.Filter{Limit: 1})
	if err != nil || len(found) == 0 {
		return
	}
	id := found[0].Message.ID
	y.load()
	y.mu.Lock()
	if !y.done[id] { // a copy may run before the removal: it has no place in the order any more
		y.removed[id] = true
	}
	y.mu.Unlock()
	n, _ := y.letters().Remove(context.Background(), inbox.Filter{IDs: []uuid.UUID{id}}, inbox.Removal{By: "test"})
	y.mu.Lock()
	defer y.mu.Unlock()
	y.gone[id] = n == 1 && y.pool != nil // in memory, a copy that rolls back meanwhile takes the entry with it
}

// newYardOnPostgres returns a yard whose processes have pools of their own.
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

func (y *yard) liveOnPostgres(ctx context.Context, p *mortal, change func(*inbox.ConsumerConfig)) {
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
	y.liveWith(ctx, p, s, func(cfg *inbox.ConsumerConfig) {
		change(cfg)
		cfg.ShutdownTimeout = time.Second
	})
}

// mortalLines are the connections of a process. Each packet sent on one of them is a step of the process. The
// last packet is still sent if the process has sends set.
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

// freeKey returns a Parking with a key that has no message left, and the claim of the key.
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

// A message is stored in an open transaction while another process finds its key without messages: the key
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

// A key becomes free while a message arrives that found it stopped: Wait reports that it is free.
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
			waits, err := p.Wait(context.Background(), "k", event(), false)
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

// Messages of different keys do not conflict, whatever plan Postgres chooses for tables with few rows.
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

// If a handler's statement takes longer than HandlerTimeout, its message has failed once. The outcome is
// stored after the server has ended the statement.
func TestParkedMessage_statementTakesTooLong(t *testing.T) {
	t.Parallel()
	y := newYardOnPostgres(t)
	y.hangs = true
	y.stopped("k", 1, 2)
	y.replay(inbox.Filter{})
	y.run(func(cfg *inbox.ConsumerConfig) { cfg.HandlerTimeout, cfg.Retry.MaxAttempts = 500*time.Millisecond, 2 })
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
