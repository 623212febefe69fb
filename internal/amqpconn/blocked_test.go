package amqpconn_test

import (
	"context"
	"errors"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/internal/amqpconn"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// A broker under a memory alarm reads nothing from connections that publish.
func TestBlocked(t *testing.T) {
	t.Parallel()
	server := testenv.Private(t, testenv.RabbitMQ, "vm_memory_high_watermark.absolute = 10MB")
	p := start(t, amqpconn.PublisherConfig{
		Dial:           func(context.Context) (*amqp.Connection, error) { return amqp.Dial(server.URL()) },
		ConfirmTimeout: 10 * time.Second, Window: 4, ShutdownTimeout: time.Second,
	})
	// More than the window holds: one waits for a place when the block becomes known.
	outcomes := make(chan error, 5)
	go func() {
		for range cap(outcomes) {
			p.Publish(t.Context(), out("", "q", "0"), func(err error) { outcomes <- err })
		}
	}()
	for range cap(outcomes) {
		select {
		case err := <-outcomes:
			if !errors.Is(err, amqpconn.ErrBlocked) {
				t.Errorf("at first: %v", err)
			}
		case <-time.After(testenv.Patience):
			t.Fatal("a message got stuck outside the window")
		}
	}
	testenv.Eventually(t, testenv.Patience, func() error {
		began := time.Now()
		err := p.Confirmed(t.Context(), out("", "q", "1"))
		if took := time.Since(began); took > time.Minute {
			t.Errorf("publishing took %v", took)
		}
		if !errors.Is(err, amqpconn.ErrBlocked) {
			return err
		}
		return nil
	})
	began := time.Now()
	if err := p.Confirmed(t.Context(), out("", "q", "2")); !errors.Is(err, amqpconn.ErrBlocked) || time.Since(began) > 5*time.Second {
		t.Errorf("after %v: %v", time.Since(began), err)
	}
	if err := p.Ready(); !errors.Is(err, amqpconn.ErrBlocked) {
		t.Errorf("ready: %v", err)
	}
}

// RabbitMQ closes the channel over a message beyond its own limit. Only that message is
// to blame, and it must be known, or it would close every channel that tries it.
func TestLargerThanTheBrokerTakes(t *testing.T) {
	t.Parallel()
	server := testenv.Private(t, testenv.RabbitMQ, "max_message_size = 65536")
	p := start(t, amqpconn.PublisherConfig{Dial: func(context.Context) (*amqp.Connection, error) { return amqp.Dial(server.URL()) }})
	huge := out("", "q", "huge")
	huge.Message.Body = make([]byte, 70_000)
	if err := p.Confirmed(t.Context(), huge); !errors.Is(err, amqpconn.ErrInvalid) {
		t.Errorf("huge: %v", err)
	}
	testenv.Eventually(t, testenv.Patience, p.Ready)
	var l ledger
	for _, o := range []amqpconn.Out{huge, out("", "q", "innocent")} {
		p.Publish(t.Context(), o, l.done(o.Message.MessageId))
	}
	l.confirmed(t)
	if err := l.outcomes["innocent"][0]; errors.Is(err, amqpconn.ErrInvalid) {
		t.Errorf("innocent: %v", err)
	}
}
