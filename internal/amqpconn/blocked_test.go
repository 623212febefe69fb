package amqpconn_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/internal/amqpconn"
	"github.com/holdfast-go/holdfast/internal/silent"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// A broker under a memory alarm reads nothing from connections that publish. Publishing then fails at once.
func TestBlocked(t *testing.T) {
	t.Parallel()
	onBroker(t, func(t *testing.T, b *silent.AMQP) {
		b.Block()
		testBlocked(t, b.Dial, b.Unblock)
	})
}

func TestBlocked_onRabbitMQ(t *testing.T) {
	t.Parallel()
	testenv.Nightly(t, "it starts a broker under a memory alarm")
	server := testenv.Private(t, testenv.RabbitMQ, "vm_memory_high_watermark.absolute = 10MB")
	testBlocked(t, func(context.Context) (*amqp.Connection, error) { return amqp.Dial(server.URL()) }, func() {
		if err := server.Control(t.Context(), "set_vm_memory_high_watermark", "absolute", "1GB"); err != nil {
			t.Fatal(err)
		}
	})
}

func testBlocked(t *testing.T, dial amqpconn.Dial, unblock func()) {
	t.Helper()
	var ready atomic.Int64
	p := start(t, amqpconn.PublisherConfig{
		Up: func() { ready.Add(1) }, Dial: dial, ConfirmTimeout: 10 * time.Second, Window: 4, ShutdownTimeout: time.Second,
	})
	// More than the window holds: one waits for a place when the block becomes known.
	outcomes := make(chan error, 5)
	go func() {
		for range cap(outcomes) {
			p.Publish(t.Context(), out("", "q", "0"), func(err error) { outcomes <- err })
		}
	}()
	for range cap(outcomes) {
		if err := <-outcomes; !errors.Is(err, amqpconn.ErrBlocked) {
			t.Errorf("at first: %v", err)
		}
	}
	testenv.Eventually(t, func() error {
		if err := p.Confirmed(t.Context(), out("", "q", "1")); !errors.Is(err, amqpconn.ErrBlocked) {
			return err
		}
		return nil
	})
	start := time.Now()
	if err := p.Confirmed(t.Context(), out("", "q", "2")); !errors.Is(err, amqpconn.ErrBlocked) || time.Since(start) > 5*time.Second {
		t.Errorf("after %v: %v", time.Since(start), err)
	}
	if err := p.Ready(); !errors.Is(err, amqpconn.ErrBlocked) {
		t.Errorf("ready: %v", err)
	}

	before := ready.Load()
	unblock()
	testenv.Eventually(t, func() error {
		if ready.Load() == before {
			return errors.New("Up was not called at the end of the alarm")
		}
		return p.Ready()
	})
}

// RabbitMQ closes the channel over a message beyond its own limit, and the connection over headers
// that do not fit in a frame. Only that message is to blame.
func TestLargerThanTheBrokerTakes(t *testing.T) {
	t.Parallel()
	testenv.Nightly(t, "it starts a broker with a limit of its own")
	losingNone(t, largerThanTheBrokerTakes)
}

func largerThanTheBrokerTakes(t *testing.T) (int64, error) {
	t.Helper()
	var failures []error
	server := testenv.Private(t, testenv.RabbitMQ, "max_message_size = 65536", "frame_max = 8192")
	var lost atomic.Int64
	p := start(t, amqpconn.PublisherConfig{
		Dial: func(context.Context) (*amqp.Connection, error) { return amqp.Dial(server.URL()) },
		Down: func(error) { lost.Add(1) },
	})
	if err := onPrivate(t, server, func(ch *amqp.Channel) error {
		_, err := ch.QueueDeclare("q", true, false, false, false, nil)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	huge, wide := out("", "q", "huge"), out("", "q", "wide")
	huge.Message.Body = make([]byte, 70_000)
	wide.Message.Headers = amqp.Table{"h": strings.Repeat("v", 8192)}
	fits := out("", "q", "fits")
	fits.Message.Headers = amqp.Table{"h": strings.Repeat("v", 8000)}
	var l ledger
	for i := range 20 {
		for _, o := range []amqpconn.Out{huge, out("", "q", "innocent"), wide, fits} {
			o.Message.MessageId += fmt.Sprint(" ", i)
			p.Publish(t.Context(), o, l.done(o.Message.MessageId))
		}
	}
	l.confirmed(t)
	for id, errs := range l.outcomes {
		var want error
		if strings.HasPrefix(id, "huge") || strings.HasPrefix(id, "wide") {
			want = amqpconn.ErrInvalid
		}
		if !errors.Is(errs[0], want) {
			failures = append(failures, fmt.Errorf("%s: %v, want %v", id, errs[0], want))
		}
	}
	return lost.Load(), errors.Join(failures...)
}

func onPrivate(t *testing.T, server *testenv.Server, do func(*amqp.Channel) error) error {
	t.Helper()
	conn, err := amqp.Dial(server.URL())
	if err != nil {
		return err
	}
	defer conn.Close()
	ch, err := conn.Channel()
	if err != nil {
		return err
	}
	return do(ch)
}
