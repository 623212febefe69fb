package inboxamqp_test

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"

	"github.com/google/uuid"
	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/internal/memory"
	"github.com/holdfast-go/holdfast/internal/amqptest"
	"github.com/holdfast-go/holdfast/internal/ids"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// A message that no retry queue takes has survived its runs: it is not quarantined.
func TestSurvivedWithoutRetryQueue(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	b.Queue(t, "orders", nil)
	b.Queue(t, "failed.quarantined", nil)
	ledger := memory.NewLedger()
	got := recorder{fail: func(*inbox.Message) error { return errBroken }}
	p := attempt(2)
	r := start(t, newConsumer(t, b.Dial, &got, config{Queue: "orders", Retry: quick, Ledger: ledger, MaxCrashes: 1}))
	b.Publish(t, "", "orders", p)
	got.await(t, 3)
	r.stop(t)
	if n := b.Depth(t, "failed.quarantined"); n != 0 {
		t.Errorf("%d messages quarantined", n)
	}
	if e, _ := ledger.Look(t.Context(), uuid.MustParse(p.MessageId)); e.Open != 0 {
		t.Errorf("entry %+v", e)
	}
}

// noCopies starts a consumer whose copies have no connection until back is called.
func noCopies(t *testing.T, b *amqptest.Broker, p inbox.Processor, cfg config) (r *running, back func()) {
	t.Helper()
	var down atomic.Bool
	dial := func(ctx context.Context) (*amqp.Connection, error) {
		if down.Load() {
			return nil, errBroken
		}
		return b.Dial(ctx)
	}
	cfg.Queue, cfg.Retry, cfg.Copies = "orders", quick, dial
	c := newConsumer(t, b.Dial, p, cfg)
	setUp(t, c)
	down.Store(true)
	return start(t, c), func() { down.Store(false) }
}

// A message that ran alone, and then waits for its copy to be published, stops no other.
func TestSuspectWaitsForItsCopy(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	ledger := memory.NewLedger()
	suspect := attempt(2)
	if err := ledger.Start(t.Context(), asMessage(suspect, 2)); err != nil {
		t.Fatal(err)
	}
	var got recorder
	got.fail = func(m *inbox.Message) error {
		if m.Attempt == 2 {
			return errBroken
		}
		return nil
	}
	r, back := noCopies(t, b, &got, config{Ledger: ledger, Concurrency: 2})
	b.Publish(t, "", "orders", suspect)
	got.await(t, 1)
	b.Publish(t, "", "orders", order())
	got.await(t, 2)
	back()
	got.await(t, 3)
	r.stop(t)
	awaitDepth(t, b, "orders", 0)
}

// Of messages that a worker takes together, those that failed before keep no other waiting.
func TestBatchDoesNotWaitForRetries(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	release := make(chan struct{})
	var got recorder
	got.fail = func(m *inbox.Message) error {
		if m.Name == "first" {
			<-release
		}
		if m.Attempt == 2 {
			return errBroken
		}
		return nil
	}
	var accepted atomic.Int64 // the consumer asks for an id when it has a message in hand
	r, back := noCopies(t, b, &got, config{Concurrency: 1, Batch: 10, DeriveID: func(*inbox.Message) uuid.UUID {
		accepted.Add(1)
		return ids.New()
	}})
	first := order()
	first.Type = "first"
	b.Publish(t, "", "orders", first)
	got.await(t, 1)
	for _, p := range []amqp.Publishing{attempt(2), order(), order()} {
		p.MessageId = ""
		b.Publish(t, "", "orders", p)
	}
	testenv.Eventually(t, func() error { // on its way to the consumer a message is in no queue any more
		if n := accepted.Load(); n < 3 {
			return fmt.Errorf("%d of 3 messages in hand", n)
		}
		return nil
	})
	close(release)
	got.await(t, 4)
	back()
	got.await(t, 5)
	r.stop(t)
	awaitDepth(t, b, "orders", 0)
}
