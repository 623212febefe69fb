package faults_test

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxamqp"
	"github.com/holdfast-go/holdfast/inbox/inboxredis"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/pgtest"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/outboxamqp"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
	"github.com/holdfast-go/holdfast/outbox/outboxredis"
)

const (
	// outage is long enough for every pause to grow to its longest.
	outage = 15 * time.Second
	// promised is the time within which all works again after an outage.
	promised = 10 * time.Second
)

// A relay and a consumer with their defaults work again within 10 s after their broker is back, and no message
// has lost an attempt.
func TestRecovery_withinTenSeconds(t *testing.T) {
	t.Parallel()
	testenv.Nightly(t, "lasts a minute and measures time")
	for _, kind := range []testenv.Kind{testenv.RabbitMQ, testenv.Redis} {
		t.Run(fmt.Sprint(kind), func(t *testing.T) {
			t.Parallel()
			var extra []string
			if kind == testenv.Redis { // a kill loses nothing
				extra = []string{"--appendonly", "yes", "--appendfsync", "always"}
			}
			server := testenv.Private(t, kind, extra...)
			proxy := testenv.NewProxy(t, server.URL())
			l := newLine(t, kind, proxy.URL())
			for _, fault := range []struct {
				name         string
				strike, heal func() error
			}{
				{"server killed", server.Kill, func() error { return server.Start(t.Context()) }},
				{"server paused", server.Pause, server.Resume},
				{"network cut", proxied(proxy.Cut), proxied(proxy.Heal)},
				{"network silent", proxied(proxy.Pause), proxied(proxy.Heal)},
				{"connections silent", proxied(proxy.SilenceConnections), proxied(proxy.Heal)},
			} {
				l.write(20)
				testenv.Eventually(t, l.works)
				must(t, fault.strike())
				for range 20 {
					l.write(1)
					time.Sleep(outage / 20)
				}
				must(t, fault.heal())
				healed := time.Now()
				l.write(1)
				testenv.Eventually(t, l.relays)
				relay := time.Since(healed)
				testenv.Eventually(t, l.works)
				consumer := time.Since(healed)
				t.Logf("%-20s relay %4.1f s, consumer %4.1f s", fault.name, relay.Seconds(), consumer.Seconds())
				if relay > promised || consumer > promised {
					t.Errorf("%s: the relay works after %v, the consumer after %v; the promise is %v", fault.name, relay, consumer, promised)
				}
			}
			l.noLetters()
		})
	}
}

func proxied(do func()) func() error {
	return func() error {
		do()
		return nil
	}
}

// line is an outbox, a relay, a broker and a consumer.
type line struct {
	t             *testing.T
	relays, works func() error // nil: all are ready, and no message waits for the relay, or for the consumer
	write         func(n int)
	noLetters     func()
}

func newLine(t *testing.T, kind testenv.Kind, broker string) *line {
	t.Helper()
	pool := pgtest.New(t)
	messages, err := outboxpgx.New(pool, outboxpgx.Config{Logger: quiet})
	must(t, err)
	must(t, messages.Migrate(t.Context()))
	var written, handled atomic.Int64
	mux := inbox.NewMux()
	must(t, inbox.Handle(mux, destination, func(context.Context, struct{}) error {
		handled.Add(1)
		return nil
	}))
	p, c := brokerOf(t, kind, broker, mux)
	must(t, c.Setup(t.Context()))
	relay, err := outbox.NewRelay(messages, p, outbox.RelayConfig{Logger: quiet})
	must(t, err)
	beside(t, relay.Run)
	beside(t, c.Run)
	l := &line{t: t}
	l.write = func(n int) {
		t.Helper()
		must(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
			for range n {
				m := outbox.Message{Name: destination, Body: []byte("{}"), Route: outbox.Route{RoutingKey: destination}}
				if err := messages.Write(t.Context(), tx, m); err != nil {
					return err
				}
			}
			return nil
		}))
		written.Add(int64(n))
	}
	l.relays = func() error {
		var n int
		err := pool.QueryRow(t.Context(), `SELECT count(*) FROM holdfast_outbox`).Scan(&n)
		if err == nil && n > 0 {
			err = fmt.Errorf("%d messages left in the outbox", n)
		}
		return errors.Join(err, p.Ready(t.Context()), relay.Ready(t.Context()))
	}
	l.works = func() error {
		if handled.Load() < written.Load() {
			return fmt.Errorf("%d of %d messages were processed", handled.Load(), written.Load())
		}
		return errors.Join(l.relays(), c.Ready(t.Context()))
	}
	l.noLetters = func() {
		t.Helper()
		var n int
		must(t, pool.QueryRow(t.Context(), `SELECT count(*) FROM holdfast_outbox_dead`).Scan(&n))
		stats, err := c.Stats(t.Context())
		must(t, err)
		for class, dead := range stats.Dead {
			if dead > 0 {
				t.Errorf("%d dead letters of the inbox, of class %s", dead, class)
			}
		}
		if n > 0 {
			t.Errorf("%d dead letters of the outbox", n)
		}
	}
	return l
}

type readyConsumer interface {
	consumer
	Ready(ctx context.Context) error
}

type readyPublisher interface {
	driver.Publisher
	Ready(ctx context.Context) error
}

// brokerOf returns publisher and consumer with their defaults.
func brokerOf(t *testing.T, kind testenv.Kind, url string, mux *inbox.Mux) (readyPublisher, readyConsumer) {
	t.Helper()
	cfg := inbox.ConsumerConfig{Logger: quiet}
	if kind == testenv.RabbitMQ {
		p, err := outboxamqp.NewPublisher(outboxamqp.Dial(url, amqp.Config{}), outboxamqp.Config{Logger: quiet})
		must(t, err)
		c, err := inboxamqp.NewConsumer(inboxamqp.Dial(url, amqp.Config{}), destination, mux, inboxamqp.Config{ConsumerConfig: cfg})
		must(t, err)
		return p, c
	}
	client, err := openRedis(url)
	must(t, err)
	t.Cleanup(func() { _ = client.Close() })
	p, err := outboxredis.NewPublisher(client, outboxredis.Config{Stream: destination})
	must(t, err)
	c, err := inboxredis.NewConsumer(client, destination, mux, inboxredis.Config{ConsumerConfig: cfg})
	must(t, err)
	return p, c
}
