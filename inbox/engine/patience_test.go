package engine_test

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/engine"
	"github.com/holdfast-go/holdfast/inbox/internal/memory"
	"github.com/holdfast-go/holdfast/inbox/internal/memqueue"
)

// Many suspects beside a handler that never returns keep the others away for one patience, not for
// one each.
func TestSuspectsShareTheirPatience(t *testing.T) {
	bubble(t, func(t *testing.T) {
		ledger := memory.NewLedger()
		release := make(chan struct{})
		var passed atomic.Bool
		p := processorFunc(func(_ context.Context, m *inbox.Message) error {
			switch m.Name {
			case "deaf":
				<-release
			case "good":
				passed.Store(true)
			}
			return nil
		})
		b := newBench(t, withLedger{p, ledger}, engine.Config{ConsumerConfig: inbox.ConsumerConfig{Concurrency: 4, Prefetch: 100}}, memqueue.Options{})
		b.put("deaf", 1)
		for _, id := range b.put("suspect", 20) {
			if err := ledger.Start(t.Context(), &inbox.Message{ID: id, Attempt: 1}); err != nil {
				t.Fatal(err)
			}
		}
		deliverInVain(t, b)
		b.start()
		time.Sleep(20 * time.Second)
		b.put("good", 1)
		time.Sleep(time.Minute)
		if !passed.Load() {
			t.Error("the good one waits for more than a minute")
		}
		close(release)
		b.idle()
		b.stop()
	})
}

// What waits for its handler's limit is given back before the broker takes back all there is.
func TestUnbegunIsGivenBack(t *testing.T) {
	bubble(t, func(t *testing.T) {
		broker := memqueue.NewBroker()
		queue := broker.Queue("orders")
		source := impatient{held{queue.Source(memqueue.Options{})}, t}
		got := &recorder{fail: func(context.Context, *inbox.Message) error { time.Sleep(4 * time.Minute); return nil }}
		b := &bench{t: t, broker: broker, queue: queue, source: source.Source}
		b.consumer = newConsumer(t, source, limited{got}, engine.Config{ConsumerConfig: inbox.ConsumerConfig{Concurrency: 4, Prefetch: 60, HandlerTimeout: 5 * time.Minute}})
		b.put("slow", 30)
		b.start()
		b.idle()
		b.stop()
		if n := len(got.messages()); n != 30 {
			t.Errorf("%d runs", n)
		}
	})
}

// impatient is a source that looks for messages that stay unsettled for too long.
type impatient struct {
	held
	t *testing.T
}

func (s impatient) Open(ctx context.Context) (driver.Session, error) {
	opened, err := s.held.Open(ctx)
	if err != nil {
		return nil, err
	}
	return &impatientSession{opened, s.t, &sync.Mutex{}, map[driver.Delivery]time.Time{}}, nil
}

type impatientSession struct {
	driver.Session
	t     *testing.T
	mu    *sync.Mutex
	since map[driver.Delivery]time.Time
}

func (s *impatientSession) Receive(ctx context.Context, most int) ([]driver.Delivery, error) {
	ds, err := s.Session.Receive(ctx, most)
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, d := range ds {
		s.since[d] = time.Now()
	}
	return ds, err
}

func (s *impatientSession) settle(ds []driver.Delivery) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, d := range ds {
		if held := time.Since(s.since[d]); held > 25*time.Minute {
			s.t.Errorf("a message was in hand for %v", held)
		}
	}
}

func (s *impatientSession) Ack(ctx context.Context, ds []driver.Delivery, mayWait bool) error {
	s.settle(ds)
	return s.Session.Ack(ctx, ds, mayWait)
}

func (s *impatientSession) GiveBack(ctx context.Context, ds []driver.Delivery) error {
	s.settle(ds)
	return s.Session.GiveBack(ctx, ds)
}

// slow is a source whose moves take long, as where confirms do not come.
type slow struct{ driver.Source }

func (s slow) Move(ctx context.Context, moves []driver.Move) []error {
	time.Sleep(30 * time.Second)
	return s.Source.Move(ctx, moves)
}

// Failed messages that are being moved, and fill the window, do not keep the good ones out.
func TestSlowMovesLetOthersPass(t *testing.T) {
	t.Parallel()
	for _, batch := range []int{1, 8} {
		t.Run(fmt.Sprint("batch of ", batch), func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				const prefetch, good = 16, 40
				var passed atomic.Int32
				p := processorFunc(func(_ context.Context, m *inbox.Message) error {
					if m.Name == "bad" {
						return errBroken
					}
					passed.Add(1)
					return nil
				})
				broker := memqueue.NewBroker()
				b := &bench{t: t, broker: broker, queue: broker.Queue("orders")}
				b.consumer = newConsumer(t, slow{b.queue.Source(memqueue.Options{})}, p,
					engine.Config{ConsumerConfig: inbox.ConsumerConfig{Concurrency: 8, Prefetch: prefetch, Batch: batch}})
				b.put("bad", prefetch)
				b.put("good", good)
				b.start()
				began := time.Now()
				eventually(t, "the good ones pass", func() bool { return passed.Load() == good })
				if took := time.Since(began); took > 5*time.Second {
					t.Errorf("%v behind messages that are being moved", took)
				}
				b.idle()
				b.stop()
			})
		})
	}
}
