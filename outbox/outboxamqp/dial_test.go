package outboxamqp_test

import (
	"context"
	"errors"
	"net"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/internal/amqptest"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/outbox/outboxamqp"
)

func TestDial(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	b.Queue(t, "q", nil)
	var dialled net.Conn
	for name, cfg := range map[string]amqp.Config{
		"zero": {},
		"own dial function": {Dial: func(network, addr string) (net.Conn, error) {
			conn, err := amqp.DefaultDial(10*time.Second)(network, addr)
			dialled = conn
			return conn, err
		}},
	} {
		p := running(t, outboxamqp.Dial(b.URL, cfg), outboxamqp.Config{})
		if err := publish(t, p, message(t, "q")); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	if dialled == nil {
		t.Error("the own dial function was not called")
	}
	b.Take(t, "q", 2, testenv.Patience)
}

// A host that accepts connections and says nothing must not hold the caller longer than its deadline.
func TestDialHonoursDeadline(t *testing.T) {
	t.Parallel()
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	dial := outboxamqp.Dial("amqp://"+silent.Addr().String(), amqp.Config{})
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if _, err := dial(ctx); err == nil {
		t.Error("connected to a host that says nothing")
	}
	cancelled, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := dial(cancelled); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
}
