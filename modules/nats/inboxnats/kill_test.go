package inboxnats_test

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
	"github.com/holdfast-go/holdfast/inbox/inboxtest"
	"github.com/holdfast-go/holdfast/internal/ids"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/modules/nats/inboxnats"
	"github.com/holdfast-go/holdfast/modules/nats/internal/natstest"
	"github.com/holdfast-go/holdfast/modules/nats/outboxnats"
	outbox "github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

// The server is killed while messages are published and consumed. All confirmed messages are processed, none becomes
// a dead letter, and a processor that remembers ids processes each once.
func TestKilledServer_losesNothing(t *testing.T) {
	t.Parallel()
	const n, kills = 300, 2
	server := testenv.Private(t, testenv.NATS)
	conn := natstest.Connect(t, server.URL())
	var mu sync.Mutex
	done := map[uuid.UUID]int{}
	store, err := inboxtest.New(txretrytest.New(txretrytest.Config{}), billing, inboxpgx.Config{})
	noError(t, err)
	noError(t, inboxpgx.Handle(store, "event", func(ctx context.Context, _ pgx.Tx, _ struct{}) error {
		m, _ := inbox.FromContext(ctx)
		mu.Lock()
		defer mu.Unlock()
		done[m.ID]++
		return nil
	}))
	consumer, err := inboxnats.NewConsumer(conn, inboxnats.Stream{Name: "shop"}, store, inbox.ConsumerConfig{Name: billing, Logger: slog.New(slog.DiscardHandler)})
	noError(t, err)
	noError(t, consumer.Setup(t.Context()))
	ctx, stop := context.WithCancel(context.WithoutCancel(t.Context()))
	ended := make(chan error, 1)
	go func() { ended <- consumer.Run(ctx) }()
	publisher, err := outboxnats.NewPublisher(conn, outboxnats.Config{Topic: "shop"})
	noError(t, err)
	sent := map[uuid.UUID]bool{}
	for i := range n {
		if i > 0 && i%(n/(kills+1)) == 0 {
			noError(t, server.Kill(), server.Start(t.Context()))
		}
		m := outbox.Message{ID: ids.Deterministic(time.Now(), fmt.Sprint(i)), Name: "event", Body: []byte("{}")}
		sent[m.ID] = true
		testenv.Eventually(t, func() error { // as a relay does
			outcome := make(chan error, 1)
			publisher.Publish(t.Context(), m, func(err error) { outcome <- err })
			return <-outcome
		})
	}
	testenv.Eventually(t, func() error {
		mu.Lock()
		defer mu.Unlock()
		if len(done) < n {
			return fmt.Errorf("%d of %d messages are done", len(done), n)
		}
		return nil
	})
	stop()
	noError(t, <-ended)
	dead, err := consumer.DeadLetters().Count(t.Context(), inbox.Filter{})
	noError(t, err)
	if dead > 0 {
		t.Errorf("%d dead letters", dead)
	}
	stats, err := consumer.Stats(t.Context())
	noError(t, err)
	if stats.Waiting != 0 {
		t.Errorf("%d messages wait", stats.Waiting)
	}
	for id, runs := range done {
		if runs != 1 || !sent[id] {
			t.Errorf("the handler ran %d times for message %s", runs, id)
		}
	}
	stream, err := natstest.JetStream(t, conn).Stream(t.Context(), "shop")
	noError(t, err)
	if state := stream.CachedInfo().State; state.LastSeq != n {
		t.Errorf("%d messages were stored, want %d", state.LastSeq, n)
	}
}

// Check names missing objects, and a durable consumer that others have changed.
func TestCheck(t *testing.T) {
	t.Parallel()
	conn := natstest.New(t)
	name := natstest.Name(t, conn)
	consumer, err := inboxnats.NewConsumer(conn, inboxnats.Stream{Name: name}, inbox.NewMux(), inbox.ConsumerConfig{Name: billing})
	noError(t, err)
	if err := consumer.Check(t.Context()); err == nil || strings.Count(err.Error(), "call Consumer.Setup") != 5 {
		t.Errorf("before Setup: %v", err)
	}
	for range 2 {
		noError(t, consumer.Setup(t.Context()))
	}
	noError(t, consumer.Check(t.Context()))
	js := natstest.JetStream(t, conn)
	c, err := js.Consumer(t.Context(), name, billing)
	noError(t, err)
	cfg := c.CachedInfo().Config
	cfg.BackOff, cfg.MaxDeliver, cfg.MaxAckPending = []time.Duration{time.Second, 2 * time.Second}, 3, 1
	_, err = js.UpdateConsumer(t.Context(), name, cfg)
	noError(t, err)
	err = consumer.Check(t.Context())
	for _, want := range []string{"whose first step 1s replaces ack_wait", "drops messages after 3", "stops at 1 unsettled"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v does not say %q", err, want)
		}
	}
}
