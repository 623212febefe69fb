package inboxpgx_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
	"github.com/holdfast-go/holdfast/inbox/inboxtest"
	"github.com/holdfast-go/holdfast/inbox/inboxtest/conformance"
	"github.com/holdfast-go/holdfast/internal/ids"
	"github.com/holdfast-go/holdfast/internal/pgtest"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

var errCrashed = errors.New("crashed")

// mortal is a process that dies after one of its steps, whose outcome it does not learn: nothing that
// it does later takes effect. To die before the next step leaves the same behind.
type mortal struct {
	at, steps atomic.Int64 // the step at which it dies, and how many it has taken
	dead      atomic.Bool
}

// step takes a step whose effect is call.
func (p *mortal) step(call func() error) error {
	if p.dead.Load() {
		return errCrashed
	}
	if p.steps.Add(1) != p.at.Load() {
		return call()
	}
	p.dead.Store(true)
	_ = call()
	return errCrashed
}

// fault has the queue take part. An acknowledgement is a step.
func (p *mortal) fault(at inboxtest.Step, _ *inbox.Message) inboxtest.Outcome {
	switch {
	case p.dead.Load():
		return inboxtest.FailBefore
	case at != inboxtest.AtAck || p.steps.Add(1) != p.at.Load():
		return inboxtest.OK
	}
	p.dead.Store(true)
	return inboxtest.FailAfter
}

// mortalStore is a Store in such a process.
type mortalStore struct {
	*inboxpgx.Store
	process *mortal
}

func (s mortalStore) Parking(used bool) driver.Parking {
	return mortalParking{s.Store.Parking(used), s.process}
}

// Process implements inbox.Processor: the handler's transaction is a step.
func (s mortalStore) Process(ctx context.Context, msgs []*inbox.Message) (results []error) {
	if err := s.process.step(func() error {
		results = s.Store.Process(ctx, msgs)
		return nil
	}); err != nil {
		return slices.Repeat([]error{inbox.Unavailable(err)}, len(msgs))
	}
	return results
}

// mortalParking is a Parking whose calls are steps, but for looking at all keys.
type mortalParking struct {
	driver.Parking
	process *mortal
}

func (p mortalParking) Heads(ctx context.Context, after string, most int) ([]driver.Head, error) {
	if p.process.dead.Load() {
		return nil, errCrashed
	}
	return p.Parking.Heads(ctx, after, most)
}

func (p mortalParking) Stop(ctx context.Context, key string, dead inbox.DeadLetter) error {
	return p.process.step(func() error { return p.Parking.Stop(ctx, key, dead) })
}

func (p mortalParking) Append(ctx context.Context, key string, m *inbox.Message) error {
	return p.process.step(func() error { return p.Parking.Append(ctx, key, m) })
}

func (p mortalParking) Claim(ctx context.Context, key string, l driver.Lease) (m *inbox.Message, there bool, err error) {
	err = p.process.step(func() error {
		// What is on its way when the process dies takes effect.
		m, there, err = p.Parking.Claim(context.WithoutCancel(ctx), key, l)
		return err
	})
	if err != nil {
		return nil, false, err
	}
	return m, there, nil
}

func (p mortalParking) Fail(ctx context.Context, owner uuid.UUID, dead inbox.DeadLetter) error {
	return p.process.step(func() error { return p.Parking.Fail(ctx, owner, dead) })
}

func (p mortalParking) Done(ctx context.Context, owner uuid.UUID, m *inbox.Message) error {
	return p.process.step(func() error { return p.Parking.Done(ctx, owner, m) })
}

// Renew implements driver.Parking. It is no step: when it is called depends on the time.
func (p mortalParking) Renew(ctx context.Context, l driver.Lease, messages []uuid.UUID) ([]uuid.UUID, error) {
	if p.process.dead.Load() {
		return nil, errCrashed
	}
	return p.Parking.Renew(ctx, l, messages)
}

// siding is a queue of one key and a consumer on Postgres. The first message fails until it is mended.
type siding struct {
	t      *testing.T
	pool   *pgxpool.Pool
	broker *inboxtest.Broker
	mended atomic.Bool
}

// start runs a process until it dies or the returned function is called.
func (s *siding) start(process *mortal) (letters inbox.DeadLetters, stop func()) {
	s.t.Helper()
	store := newStore(s.t, newManager(s.t, s.pool), "a", inboxpgx.Config{})
	handle(s.t, store, func(ctx context.Context, tx pgx.Tx, e conformance.Event) error {
		if e.Number == 1 && !s.mended.Load() {
			return inbox.Unrecoverable(errors.New("no"))
		}
		_, err := tx.Exec(ctx, `INSERT INTO effects_in_order (number) VALUES ($1)`, e.Number)
		return err
	})
	consumer, err := inboxtest.NewConsumer(s.broker, "orders", mortalStore{store, process}, inboxtest.Config{
		ConsumerConfig: inbox.ConsumerConfig{Ordered: true, ParkKeys: true, ShutdownTimeout: 10 * time.Second},
		Fault:          process.fault,
	})
	if err != nil {
		s.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		if err := consumer.Run(ctx); err != nil {
			s.t.Error(err)
		}
	}()
	go func() { // the dead do not drain
		for ctx.Err() == nil && !process.dead.Load() {
			time.Sleep(5 * time.Millisecond)
		}
		cancel()
	}()
	return consumer.DeadLetters(), func() {
		cancel()
		<-ended
	}
}

func (s *siding) put(key string, numbers ...int) {
	s.t.Helper()
	for _, n := range numbers {
		m := &inbox.Message{ID: ids.New(), Name: conformance.Name, Key: key, Body: fmt.Appendf(nil, `{"number":%d}`, n)}
		if err := s.broker.Send(s.t.Context(), m); err != nil {
			s.t.Fatal(err)
		}
	}
}

func (s *siding) await(what string, holds func() (bool, error)) {
	s.t.Helper()
	testenv.Eventually(s.t, func() error {
		ok, err := holds()
		if err == nil && !ok {
			err = errors.New("not yet: " + what)
		}
		return err
	})
}

// effects are the numbers in the order of their commits.
func (s *siding) effects() ([]int, error) {
	rows, err := s.pool.Query(s.t.Context(), `SELECT number FROM effects_in_order WHERE number > 0 ORDER BY seq`)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowTo[int])
}

// outlive ends the claims of the dead, as time does.
func (s *siding) outlive() {
	if _, err := s.pool.Exec(s.t.Context(), `UPDATE holdfast_inbox_parked SET claimed_until = now() WHERE claimed_until > now()`); err != nil {
		s.t.Error(err)
	}
}

func (s *siding) parked() (n int, err error) {
	err = s.pool.QueryRow(s.t.Context(), `SELECT count(*) FROM holdfast_inbox_parked`).Scan(&n)
	return n, err
}

// The process may die between any two steps of parking and resuming a key: each message takes effect
// once, in the order of the key.
func TestParkedKeyThroughCrashes(t *testing.T) {
	t.Parallel()
	for step := range int64(28) {
		t.Run(fmt.Sprint("step ", step), func(t *testing.T) {
			t.Parallel()
			process := &mortal{}
			process.at.Store(step + 1)
			parkedKeyThroughCrash(t, process)
		})
	}
}

// What a process has claimed that has died is another one's when the claim is over, and not before.
func TestParkedKeyOfADeadOwner(t *testing.T) {
	t.Parallel()
	s := newSiding(t)
	s.mended.Store(true)
	parking := newStore(t, newManager(t, s.pool), "a", inboxpgx.Config{}).Parking(true)
	m := &inbox.Message{ID: ids.New(), Name: conformance.Name, Key: "k", Attempt: 1, Body: []byte(`{"number":1}`)}
	if err := parking.Append(t.Context(), "k", m); err != nil {
		t.Fatal(err)
	}
	process := &mortal{}
	process.at.Store(1) // it claims the message and dies: it has nothing else to do
	_, stop := s.start(process)
	s.await("the first process is dead", func() (bool, error) { return process.dead.Load(), nil })
	began := time.Now()
	stop()
	_, stop = s.start(&mortal{})
	defer stop()
	s.put("other", 0)
	s.await("the other one goes on", func() (bool, error) {
		got, err := s.effects()
		return len(got) == 1, err
	})
	if took := time.Since(began); took < 25*time.Second {
		t.Errorf("the claim was over after %v", took)
	}
}

func newSiding(t *testing.T) *siding {
	t.Helper()
	s := &siding{t: t, pool: pgtest.New(t), broker: inboxtest.NewBroker()}
	createTables(t, s.pool)
	if _, err := s.pool.Exec(t.Context(), `CREATE TABLE effects_in_order (seq bigint GENERATED ALWAYS AS IDENTITY, number int)`); err != nil {
		t.Fatal(err)
	}
	return s
}

func parkedKeyThroughCrash(t *testing.T, process *mortal) {
	t.Helper()
	s := newSiding(t)
	letters, stop := s.start(process)
	revive := func() { // another process takes the place of a dead one
		if process.dead.Load() {
			stop()
			process = &mortal{}
			s.outlive()
			letters, stop = s.start(process)
			s.put("other", 0) // so that it knows that it is served
		}
	}
	defer func() { stop() }()
	s.put("k", 1, 2, 3)
	s.await("the key is parked", func() (bool, error) {
		revive()
		n, err := s.parked()
		return n == 3, err
	})
	s.mended.Store(true)
	s.await("the dead letter is replayed", func() (bool, error) {
		revive()
		done, err := letters.Replay(t.Context(), inbox.Filter{}, inbox.Replay{By: "test"})
		if process.dead.Load() { // by what it did meanwhile, perhaps after the replay
			err = nil
		}
		return done.Returned == 1, err
	})
	s.put("k", 4)
	s.await("all is done", func() (bool, error) {
		revive()
		got, err := s.effects()
		if len(got) < 4 || err != nil {
			return false, err
		}
		n, err := s.parked()
		return n == 0, err
	})
	s.put("k", 5)
	s.await("the key is free", func() (bool, error) {
		revive()
		got, err := s.effects()
		return len(got) >= 5, err
	})
	if got, err := s.effects(); !slices.Equal(got, []int{1, 2, 3, 4, 5}) || err != nil {
		t.Errorf("effects %v, error %v", got, err)
	}
	t.Logf("%d steps", process.steps.Load())
}
