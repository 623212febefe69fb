package engine_test

import (
	"context"
	"sync/atomic"
	"testing"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/engine"
	"github.com/holdfast-go/holdfast/internal/ids"
)

// endless is a source that costs nothing: it hands out as many messages as are wanted.
type endless struct {
	left  atomic.Int64
	room  chan int // settled ones
	ended chan struct{}
}

type given struct{ m inbox.Message }

func (g *given) Message() *inbox.Message { return &g.m }

func (s *endless) Traits() driver.Traits { return driver.Traits{System: "none", MaxWindow: 8000} }
func (s *endless) Open(context.Context) (driver.Session, error) {
	return s, nil
}
func (s *endless) Move(context.Context, []driver.Move) []error { return nil }
func (s *endless) Run(ctx context.Context)                     { <-ctx.Done() }
func (s *endless) Ready(context.Context) error                 { return nil }
func (s *endless) Start(_ context.Context, window int) error {
	s.room <- window
	return nil
}

func (s *endless) Receive(ctx context.Context, most int) ([]driver.Delivery, error) {
	select {
	case n := <-s.room:
		for {
			select {
			case more := <-s.room:
				n += more
				continue
			default:
			}
			break
		}
		ds := make([]driver.Delivery, n)
		for i := range ds {
			g := &given{}
			g.m.ID, g.m.Name, g.m.Attempt = id, "order", 1
			ds[i] = g
		}
		return ds, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (s *endless) Ack(_ context.Context, ds []driver.Delivery, _ bool) error {
	if s.left.Add(-int64(len(ds))) <= 0 {
		select {
		case s.ended <- struct{}{}:
		default:
		}
		return nil
	}
	s.room <- len(ds)
	return nil
}
func (s *endless) GiveBack(context.Context, []driver.Delivery) error { return nil }
func (s *endless) Stop(context.Context) error                        { return nil }
func (s *endless) Close(context.Context) error                       { return nil }

var id = ids.New()

type nothing struct{}

func (nothing) Process(_ context.Context, msgs []*inbox.Message) []error {
	return make([]error, len(msgs))
}

// BenchmarkEngine is what the engine costs for one message that goes well.
func BenchmarkEngine(b *testing.B) {
	for name, cfg := range map[string]inbox.ConsumerConfig{
		"single":          {Concurrency: 8, Prefetch: 500},
		"single, 1":       {Concurrency: 1, Prefetch: 500},
		"batch, 1 worker": {Concurrency: 1, Batch: 50, Prefetch: 500},
		"batch, 4":        {Concurrency: 4, Batch: 50, Prefetch: 500},
	} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			s := &endless{room: make(chan int, 10_000), ended: make(chan struct{}, 1)}
			s.left.Store(int64(b.N))
			c, err := engine.New(s, nothing{}, engine.Config{ConsumerConfig: cfg, Queue: "orders", Package: "inboxtest"})
			if err != nil {
				b.Fatal(err)
			}
			ctx, cancel := context.WithCancel(context.Background())
			done := make(chan error, 1)
			go func() { done <- c.Run(ctx) }()
			<-s.ended
			cancel()
			if err := <-done; err != nil {
				b.Fatal(err)
			}
		})
	}
}
