package inboxnats

import (
	"context"
	"log/slog"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/modules/nats/internal/natstest"
)

// The durable consumer was there before, with a longer ack wait: its server redelivers the messages of a dead owner later.
func TestTakeOver_waitsForRedelivery(t *testing.T) {
	t.Parallel()
	conn := natstest.New(t)
	js, name := natstest.JetStream(t, conn), natstest.Name(t, conn)
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	_, err := js.CreateStream(t.Context(), jetstream.StreamConfig{Name: name, Subjects: []string{name + ".>"}})
	must(err)
	durable, err := js.CreateConsumer(t.Context(), name, jetstream.ConsumerConfig{
		Durable: "billing", FilterSubject: name + ".>", AckPolicy: jetstream.AckExplicitPolicy, AckWait: time.Minute, MaxAckPending: -1,
	})
	must(err)
	consumer, err := NewConsumer(conn, Stream{Name: name}, inbox.NewMux(), inbox.ConsumerConfig{Name: "billing", Ordered: true})
	must(err)
	must(consumer.Setup(t.Context()))
	_, err = js.Publish(t.Context(), name+".order.placed", nil)
	must(err)
	_, err = durable.Next() // the dead owner's
	must(err)

	opened, err := consumer.parts[0].Open(t.Context())
	must(err)
	s := opened.(*session)
	redelivered := time.Now().Add(time.Minute)
	must(s.takeOver(t.Context()))
	if after, until := s.feeds[0].after, s.hand.until; s.hand.hold != 1 || after.Before(redelivered) || until.Before(after.Add(pullTime)) { // timing: times that takeOver computes
		t.Errorf("waits for %d messages, from %v until %v; they come at %v", s.hand.hold, after, until, redelivered)
	}
	must(s.Close(t.Context()))
}

// A session could not requeue a message. The next owner waits for its redelivery, also if the connection came back before
// the session closed.
func TestClose_afterFailedRequeue(t *testing.T) {
	t.Parallel()
	conn := natstest.New(t)
	name := natstest.Name(t, conn)
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	consumer, err := NewConsumer(conn, Stream{Name: name}, inbox.NewMux(), inbox.ConsumerConfig{
		Name: "billing", Ordered: true, Logger: slog.New(slog.DiscardHandler),
	})
	must(err)
	must(consumer.Setup(t.Context()))
	_, err = natstest.JetStream(t, conn).Publish(t.Context(), name+".order.placed", nil)
	must(err)
	for _, fails := range []bool{false, true} {
		s, err := consumer.parts[0].Open(t.Context())
		must(err)
		must(s.Start(t.Context(), 1))
		ds, err := s.Receive(t.Context(), 1)
		must(err)
		ctx, cancel := context.WithCancel(t.Context())
		if fails {
			cancel()
		}
		if err := s.GiveBack(ctx, ds); (err != nil) != fails {
			t.Fatalf("requeue: %v", err)
		}
		cancel()
		must(s.Close(t.Context()))
		next := &lease{source: consumer.parts[0]}
		if taken, err := next.take(t.Context()); !taken || err != nil || next.clean == fails {
			t.Errorf("after a requeue that fails %v: taken %v, clean %v, error %v", fails, taken, next.clean, err)
		}
		must(next.leave(t.Context(), true))
	}
}

// Receive finds a lock held if it wakes during a requeue. It wakes again after the requeue, so the next request does not
// wait for pullPause.
func TestGiveBack_wakesReceiveAfterwards(t *testing.T) {
	t.Parallel()
	conn := natstest.New(t)
	name := natstest.Name(t, conn)
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	consumer, err := NewConsumer(conn, Stream{Name: name}, inbox.NewMux(), inbox.ConsumerConfig{Name: "billing"})
	must(err)
	must(consumer.Setup(t.Context()))
	_, err = natstest.JetStream(t, conn).Publish(t.Context(), name+".order.placed", nil)
	must(err)
	opened, err := consumer.parts[0].Open(t.Context())
	must(err)
	s := opened.(*session)
	must(s.Start(t.Context(), 1))
	ds, err := s.Receive(t.Context(), 1)
	must(err)
	for len(s.hand.changed) > 0 {
		<-s.hand.changed // of the delivery
	}
	free := make(chan struct{})
	go func() {
		for range s.hand.changed {
			if s.asking.TryLock() {
				s.asking.Unlock()
				close(free)
				return
			}
		}
	}()
	must(s.GiveBack(t.Context(), ds))
	select {
	case <-free:
	case <-time.After(testenv.Patience):
		t.Error("Receive is not woken after a requeue")
		s.hand.wake()
	}
	must(s.Close(t.Context()))
}
