package inboxamqp_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/internal/amqptest"
	"github.com/holdfast-go/holdfast/internal/ids"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// batches keeps the sizes in which messages came.
type batches struct {
	recorder
	mu    sync.Mutex
	sizes []int
	hold  time.Duration
}

func (b *batches) Process(ctx context.Context, msgs []*inbox.Message) []error {
	b.mu.Lock()
	b.sizes = append(b.sizes, len(msgs))
	b.mu.Unlock()
	time.Sleep(b.hold)
	return b.recorder.Process(ctx, msgs)
}

func (b *batches) largest() (n int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, size := range b.sizes {
		n = max(n, size)
	}
	return n
}

// What gathers while the workers are busy comes as a batch; each message ends for itself.
func TestBatch(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	got := batches{hold: 20 * time.Millisecond}
	got.fail = func(m *inbox.Message) error {
		switch {
		case m.Name == "bad" && m.Attempt < 3:
			return errBroken
		case m.Name == "dead":
			return inbox.Unrecoverable(errBroken)
		}
		return nil
	}
	r := consume(t, b, &got, config{Queue: "orders", Retry: quick, Concurrency: 2, Batch: 25})
	const n = 300
	ch := b.Channel(t)
	for i := range n {
		p := order()
		switch i % 50 {
		case 7:
			p.Type = "bad"
		case 8:
			p.Type = "dead"
		case 9:
			p.MessageId = ""
		}
		if err := ch.Publish("", "orders", false, false, p); err != nil {
			t.Fatal(err)
		}
	}
	awaitDepth(t, b, "failed.unrecoverable", 6)
	awaitDepth(t, b, "failed.validation", 6)
	got.distinct(t, n-6)
	testenv.Eventually(t, patience, func() error {
		third := 0
		for _, m := range got.messages() {
			if m.Attempt == 3 {
				third++
			}
		}
		if third != 6 {
			return fmt.Errorf("%d of 6 at their third attempt", third)
		}
		return nil
	})
	r.stop(t)
	awaitDepth(t, b, "orders", 0)
	if len(got.messages()) != n-6+2*6 {
		t.Errorf("%d messages processed", len(got.messages()))
	}
	if largest := got.largest(); largest < 10 || largest > 25 {
		t.Errorf("the largest batch had %d messages", largest)
	}
}

func TestBatchMessageLimit(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	got := batches{hold: 20 * time.Millisecond}
	c := newConsumer(t, b.Dial, &got, config{Queue: "orders", Retry: quick, Concurrency: 2, Batch: 10, MessageLimit: 37})
	if err := c.Setup(t.Context()); err != nil {
		t.Fatal(err)
	}
	for range 60 {
		b.Publish(t, "", "orders", order())
	}
	start(t, c).await(t)
	if n := len(got.messages()); n != 37 {
		t.Errorf("%d messages processed", n)
	}
	awaitDepth(t, b, "orders", 23)
}

// A connection lost under a batch brings all of it again.
func TestBatchConnectionsClosed(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	got := batches{hold: 5 * time.Millisecond}
	r := consume(t, b, &got, config{Queue: "orders", Retry: quick, Concurrency: 3, Batch: 20})
	const n = 200
	for i := range n {
		b.Publish(t, "", "orders", order())
		if i%70 == 35 {
			b.CloseConnections(t)
		}
	}
	got.distinct(t, n)
	awaitDepth(t, b, "orders", 0)
	r.stop(t)
	awaitDepth(t, b, "orders", 0)
}

// Passing through a long delay is no message of the limit's.
func TestHopsDoNotCount(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	var got recorder
	got.fail = func(m *inbox.Message) error {
		if m.Name == "slow" && m.Attempt == 1 {
			return inbox.RetryAfter(errBroken, 1200*time.Millisecond)
		}
		return nil
	}
	c := newConsumer(t, b.Dial, &got, config{Queue: "orders", Retry: quick, MessageLimit: 3})
	if err := c.Setup(t.Context()); err != nil {
		t.Fatal(err)
	}
	slow := order()
	slow.Type = "slow"
	b.Publish(t, "", "orders", slow)
	b.Publish(t, "", "orders", order())
	r := start(t, c)
	seen := got.await(t, 3)
	r.await(t)
	if last := seen[2]; last.Name != "slow" || last.Attempt != 2 || last.Recovered != 1 {
		t.Errorf("last message %+v", last)
	}
}

// Recoverable failures do not use up the retries of the others.
func TestRecoverableFailuresAreSpared(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	var got recorder
	got.fail = func(m *inbox.Message) error {
		if m.Attempt <= 4 {
			return inbox.Recoverable(errBroken)
		}
		return errBroken
	}
	consume(t, b, &got, config{Queue: "orders", Retry: inbox.RetryPolicy{MaxAttempts: 3, BaseDelay: 20 * time.Millisecond, MaxDelay: 40 * time.Millisecond}})
	b.Publish(t, "", "orders", order())
	dead := b.Take(t, "failed.default", 1, patience)[0]
	if dead.Headers["holdfast-attempt"] != "7" {
		t.Errorf("dead at attempt %v, want the 7th: 4 recoverable ones, then 1 and 2 retries", dead.Headers["holdfast-attempt"])
	}
}

func TestDeriveID(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	derived := ids.Deterministic(time.Unix(1_700_000_000, 0), "order", "1")
	var got recorder
	consume(t, b, &got, config{Queue: "orders", Retry: quick, DeriveID: func(m *inbox.Message) uuid.UUID {
		switch m.Name {
		case "stranger":
			return uuid.Nil
		case "monster":
			panic("no such sender")
		}
		return derived
	}})
	for _, name := range []string{"monster", "order.placed", "stranger"} {
		p := order()
		p.MessageId, p.Type = "4711", name
		b.Publish(t, "", "orders", p)
	}
	b.Take(t, "failed.validation", 2, patience)
	if m := got.await(t, 1)[0]; m.ID != derived {
		t.Errorf("id %v", m.ID)
	}
}

// A handler gets a deadline; one that does not mind it is reported.
func TestHandlerTimeout(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	release := make(chan struct{})
	var deaf atomic.Bool
	var log logBuffer
	c := newConsumer(t, b.Dial, processorFunc(func(ctx context.Context, m *inbox.Message) error {
		<-ctx.Done()
		if m.Name == "deaf" {
			deaf.Store(true)
			<-release
		}
		return context.Cause(ctx)
	}), config{
		Queue: "orders", Retry: inbox.RetryPolicy{MaxAttempts: 1}, HandlerTimeout: 50 * time.Millisecond,
		Logger: slog.New(slog.NewTextHandler(&log, nil)),
	})
	if err := c.Setup(t.Context()); err != nil {
		t.Fatal(err)
	}
	start(t, c)
	b.Publish(t, "", "orders", order())
	if d := b.Take(t, "failed.default", 1, patience)[0]; !strings.Contains(fmt.Sprint(d.Headers["holdfast-error"]), "HandlerTimeout") {
		t.Errorf("headers %v", d.Headers)
	}
	p := order()
	p.Type = "deaf"
	b.Publish(t, "", "orders", p)
	testenv.Eventually(t, patience, func() error {
		if !deaf.Load() || !strings.Contains(log.String(), "handler is stuck") {
			return errors.New("not reported")
		}
		if err := c.Ready(t.Context()); err == nil || !strings.Contains(err.Error(), "do not return") {
			return fmt.Errorf("ready: %v", err)
		}
		return nil
	})
	close(release)
	b.Take(t, "failed.default", 1, patience)
	testenv.Eventually(t, patience, func() error { return c.Ready(t.Context()) })
}

type logBuffer struct {
	mu   sync.Mutex
	text strings.Builder
}

func (b *logBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.Write(p)
}

func (b *logBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.String()
}
