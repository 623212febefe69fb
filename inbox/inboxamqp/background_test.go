package inboxamqp_test

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/inbox/inboxamqp"
	"github.com/holdfast-go/holdfast/internal/amqptest"
)

// tidy is a processor with work of its own, which takes a while to end.
type tidy struct {
	recorder
	begun, ended atomic.Int64
}

func (p *tidy) Background(ctx context.Context) {
	p.begun.Add(1)
	<-ctx.Done()
	time.Sleep(200 * time.Millisecond)
	p.ended.Add(1)
}

// The processor's own work lasts as long as Run, whatever else happens, and Run waits for its end.
func TestBackground(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	var p tidy
	r := consume(t, b, &p, config{})
	b.Publish(t, "", "orders", order())
	p.await(t, 1)
	if p.begun.Load() != 1 || p.ended.Load() != 0 {
		t.Errorf("begun %d times, ended %d times while Run is at work", p.begun.Load(), p.ended.Load())
	}
	r.stop(t)
	if p.begun.Load() != 1 || p.ended.Load() != 1 {
		t.Errorf("begun %d times, ended %d times after Run", p.begun.Load(), p.ended.Load())
	}
}

func TestDial(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	var got recorder
	c := newConsumer(t, inboxamqp.Dial(b.URL, amqp.Config{}), &got, config{})
	if err := c.Setup(t.Context()); err != nil {
		t.Fatal(err)
	}
	r := start(t, c)
	publishAll(t, b, "orders", "order.placed", 100)
	got.distinct(t, 100)
	r.stop(t)
	awaitDepth(t, b, "orders", 0)
}
