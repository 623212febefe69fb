package inboxamqp_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/internal/amqptest"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// While the database is down messages wait in their queue, uncounted, and nothing spins.
func TestUnavailable(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	var down atomic.Bool
	down.Store(true)
	var done atomic.Int64
	got := recorder{fail: func(*inbox.Message) error {
		if down.Load() {
			return inbox.Unavailable(errBroken)
		}
		done.Add(1)
		return nil
	}}
	r := consume(t, b, &got, config{Queue: "orders", Retry: quick})
	const n = 20
	for range n {
		b.Publish(t, "", "orders", order())
	}
	testenv.Eventually(t, patience, func() error {
		if err := r.Ready(t.Context()); err == nil {
			return errors.New("ready")
		}
		return nil
	})
	tried := got.await(t, 3)
	if len(tried) > 2*n {
		t.Errorf("%d deliveries while unavailable: a hot loop", len(tried))
	}
	down.Store(false)
	ready(t, r)
	testenv.Eventually(t, patience, func() error {
		if d := done.Load(); d < n {
			return fmt.Errorf("%d of %d messages", d, n)
		}
		return nil
	})
	for _, m := range got.messages() {
		if m.Attempt != 1 {
			t.Errorf("attempt %d", m.Attempt)
		}
	}
	r.stop(t)
	awaitDepth(t, b, "orders", 0)
}

// The broker drops the connections while handlers run: what they settle afterwards is
// dropped, the messages come again, and none is lost.
func TestStaleSettle(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	started, release := make(chan struct{}, 10), make(chan struct{})
	var got recorder
	var first sync.Once
	r := consume(t, b, processorFunc(func(ctx context.Context, m *inbox.Message) error {
		blocked := false
		first.Do(func() { blocked = true })
		if blocked {
			started <- struct{}{}
			<-release
		}
		return got.Process(ctx, []*inbox.Message{m})[0]
	}), config{Queue: "orders", Retry: quick, Concurrency: 2})
	b.Publish(t, "", "orders", order())
	<-started
	b.CloseConnections(t)
	// The new session delivers it again, to the other worker.
	again := got.await(t, 1)[0]
	if !again.Redelivered {
		t.Errorf("message %+v", again)
	}
	more := []amqp.Publishing{order(), order(), order()}
	for _, p := range more {
		b.Publish(t, "", "orders", p)
	}
	got.distinct(t, 4)
	close(release)
	got.await(t, 5)
	r.stop(t)
	awaitDepth(t, b, "orders", 0)
}

func TestConnectionsClosed(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	var got recorder
	got.fail = func(m *inbox.Message) error {
		if m.Attempt < 2 {
			return errBroken // so that copies are on their way, too
		}
		return nil
	}
	r := consume(t, b, &got, config{Queue: "orders", Retry: quick})
	const n = 150
	for i := range n {
		b.Publish(t, "", "orders", order())
		if i%50 == 25 {
			b.CloseConnections(t)
		}
	}
	finished := func() error {
		done := map[string]bool{}
		for _, m := range got.messages() {
			if m.Attempt >= 2 {
				done[m.ID.String()] = true
			}
		}
		if len(done) < n {
			return fmt.Errorf("%d of %d messages processed", len(done), n)
		}
		return nil
	}
	testenv.Eventually(t, patience, finished)
	awaitDepth(t, b, "orders", 0)
	r.stop(t)
	awaitDepth(t, b, "failed.default", 0)
}

func TestQueueDeleted(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	var got recorder
	r := consume(t, b, &got, config{Queue: "orders", Retry: quick})
	if _, err := b.Channel(t).QueueDelete("orders", false, false, false); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, patience, func() error {
		if r.Ready(t.Context()) == nil {
			return errors.New("ready without a queue")
		}
		return nil
	})
	if err := r.Setup(t.Context()); err != nil {
		t.Fatal(err)
	}
	b.Publish(t, "", "orders", order())
	got.await(t, 1)
}

func TestBrokerRestarts(t *testing.T) {
	t.Parallel()
	server := testenv.Private(t, testenv.RabbitMQ)
	var got recorder
	var failed, succeeded sync.Map
	got.fail = func(m *inbox.Message) error {
		if _, before := failed.LoadOrStore(m.ID, true); !before {
			return errBroken
		}
		succeeded.Store(m.ID, true)
		return nil
	}
	proxy := testenv.NewProxy(t, server.URL())
	proxy.Cut()
	var refused atomic.Int64
	dial := func(context.Context) (*amqp.Connection, error) {
		conn, err := amqp.Dial(proxy.URL())
		if err != nil {
			refused.Add(1)
		}
		return conn, err
	}
	c := newConsumer(t, dial, &got, config{Queue: "orders", Retry: quick})
	r := start(t, c) // before its broker is there
	testenv.Eventually(t, patience, func() error {
		if refused.Load() == 0 {
			return errors.New("not tried yet")
		}
		return nil
	})
	proxy.Heal()
	if err := c.Setup(t.Context()); err != nil {
		t.Fatal(err)
	}
	ready(t, r)
	b := amqptest.On(t, server.URL(), server.AdminURL())
	b.URL = server.URL() // the default virtual host, where the queue is
	const n = 60
	for i := range n {
		b.Publish(t, "", "orders", order())
		switch i {
		case 20:
			if err := server.Restart(t.Context()); err != nil {
				t.Fatal(err)
			}
		case 40:
			if err := server.Kill(); err != nil {
				t.Fatal(err)
			}
			if err := server.Start(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
	}
	testenv.Eventually(t, 2*patience, func() error {
		done := 0
		succeeded.Range(func(any, any) bool { done++; return true })
		if done < n {
			return fmt.Errorf("%d of %d messages processed", done, n)
		}
		return nil
	})
	r.stop(t)
	awaitDepth(t, b, "orders", 0)
}
