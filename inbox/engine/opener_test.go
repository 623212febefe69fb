package engine_test

import (
	"context"
	"sync/atomic"
	"testing"
	"testing/synctest"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/engine"
	"github.com/holdfast-go/holdfast/inbox/internal/memqueue"
)

// slowSource delivers messages named large only once their decoding is allowed.
type slowSource struct {
	*memqueue.Source
	decode  chan struct{}
	decoded *atomic.Int64
	opened  *atomic.Int64
}

func (s slowSource) Open(ctx context.Context) (driver.Session, error) {
	s.opened.Add(1)
	session, err := s.Source.Open(ctx)
	return slowSession{session, s}, err
}

type slowSession struct {
	driver.Session
	source slowSource
}

func (s slowSession) Receive(ctx context.Context, most int) ([]driver.Delivery, error) {
	ds, err := s.Session.Receive(ctx, most)
	for i, d := range ds {
		ds[i] = slowDelivery{d, s.source}
	}
	return ds, err
}

func (s slowSession) Ack(ctx context.Context, ds []driver.Delivery, mayWait bool) error {
	return s.Session.Ack(ctx, inner(ds), mayWait)
}

func (s slowSession) GiveBack(ctx context.Context, ds []driver.Delivery) error {
	return s.Session.GiveBack(ctx, inner(ds))
}

func inner(ds []driver.Delivery) []driver.Delivery {
	all := make([]driver.Delivery, len(ds))
	for i, d := range ds {
		all[i] = d.(slowDelivery).Delivery
	}
	return all
}

type slowDelivery struct {
	driver.Delivery
	source slowSource
}

func (d slowDelivery) Slow() bool { return d.Delivery.Message().Name == "large" }

func (d slowDelivery) Message() *inbox.Message {
	if d.Slow() {
		d.source.decoded.Add(1)
		<-d.source.decode
	}
	return d.Delivery.Message()
}

// While large bodies are decoded, other messages are received and processed. In a drain, messages that were
// not decoded are requeued.
func TestOpener_slowBodiesHoldUpNobody(t *testing.T) {
	bubble(t, func(t *testing.T) {
		queue := memqueue.NewBroker().Queue("orders")
		source := slowSource{queue.Source(memqueue.Options{}), make(chan struct{}), new(atomic.Int64), new(atomic.Int64)}
		got := &recorder{}
		b := &bench{t: t, queue: queue, source: source.Source, consumer: newConsumer(t, source, got, engine.Config{ConsumerConfig: inbox.ConsumerConfig{Concurrency: 8}})}
		b.put("large", 5)
		b.start()
		eventually(t, "some are decoded", func() bool { return source.decoded.Load() == 2 })
		b.put("small", 20)
		eventually(t, "the others are processed", func() bool { return len(got.messages()) == 20 })
		if err := ready(b); err != nil {
			t.Errorf("Ready = %v", err)
		}
		source.decode <- struct{}{}
		eventually(t, "one of them is processed", func() bool { return len(got.messages()) == 21 })
		b.cancel()
		eventually(t, "the next is decoded", func() bool { return source.decoded.Load() == 3 })
		close(source.decode)
		b.stop()
		if n := len(got.messages()); n != 21 {
			t.Errorf("%d messages were processed", n)
		}
		again := newConsumer(t, source.Source, got, engine.Config{})
		b = &bench{t: t, queue: queue, source: source.Source, consumer: again}
		b.start()
		eventually(t, "none is lost", func() bool { return len(got.messages()) == 25 })
		b.stop()
	})
}

// When a session fails, the next one does not wait until the bodies of the failed one are decoded.
func TestOpener_failedSessionIsNotDecoded(t *testing.T) {
	bubble(t, func(t *testing.T) {
		queue := memqueue.NewBroker().Queue("orders")
		source := slowSource{queue.Source(memqueue.Options{}), make(chan struct{}), new(atomic.Int64), new(atomic.Int64)}
		got := &recorder{}
		b := &bench{t: t, queue: queue, source: source.Source, consumer: newConsumer(t, source, got, engine.Config{ConsumerConfig: inbox.ConsumerConfig{Concurrency: 8}})}
		b.put("large", 6)
		b.start()
		eventually(t, "some are decoded", func() bool { return source.decoded.Load() == 2 })
		queue.Cut()
		synctest.Wait()
		for range 2 {
			source.decode <- struct{}{}
		}
		eventually(t, "there is another session", func() bool { return source.opened.Load() == 2 })
		close(source.decode)
		eventually(t, "none is lost", func() bool { return len(got.messages()) >= 6 })
		b.stop()
	})
}
