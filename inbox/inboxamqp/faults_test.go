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
	testenv.Eventually(t, func() error {
		if refused.Load() == 0 {
			return errors.New("not tried yet")
		}
		return nil
	})
	proxy.Heal()
	setUp(t, c)
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
	testenv.Eventually(t, func() error {
		done := 0
		succeeded.Range(func(any, any) bool { done++; return true })
		if done < n {
			return fmt.Errorf("%d of %d messages processed", done, n)
		}
		return nil
	})
	awaitDepth(t, b, "orders", 0) // what a lost acknowledgement brings again is handled, too
	r.stop(t)
	awaitDepth(t, b, "orders", 0)
}
