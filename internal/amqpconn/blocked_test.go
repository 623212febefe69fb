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
		ConfirmTimeout: 2 * time.Second, Window: 4, ShutdownTimeout: time.Second,
	})
	testenv.Eventually(t, 30*time.Second, func() error {
		began := time.Now()
		err := p.Confirmed(t.Context(), out("", "q", "1"))
		if took := time.Since(began); took > 5*time.Second {
			t.Errorf("publishing took %v", took)
		}
		if !errors.Is(err, amqpconn.ErrBlocked) {
			return err
		}
		return nil
	})
	began := time.Now()
	if err := p.Confirmed(t.Context(), out("", "q", "2")); !errors.Is(err, amqpconn.ErrBlocked) || time.Since(began) > time.Second {
		t.Errorf("after %v: %v", time.Since(began), err)
	}
	if err := p.Ready(); !errors.Is(err, amqpconn.ErrBlocked) {
		t.Errorf("ready: %v", err)
	}
}
