package inboxnats_test

import (
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/modules/nats/inboxnats"
	"github.com/holdfast-go/holdfast/modules/nats/internal/natstest"
)

// Relays publish while several processes set up the stream. Each partition gets all messages that were confirmed.
func TestSetup_besideRelays(t *testing.T) {
	t.Parallel()
	conn := natstest.New(t)
	name, js := natstest.Name(t, conn), natstest.JetStream(t, conn)
	const partitions, processes = 4, 3
	var confirmed [partitions]atomic.Int64
	var publishing, settingUp sync.WaitGroup
	ready := make(chan struct{})
	for i := range partitions {
		publishing.Go(func() {
			for after := 10; after > 0; { // the last ones once all is set up
				_, err := js.Publish(t.Context(), fmt.Sprintf("%s.%d.order.placed", name, i), nil, jetstream.WithRetryAttempts(0))
				if err == nil {
					confirmed[i].Add(1)
				}
				select {
				case <-ready:
					after--
				default:
				}
			}
		})
	}
	for range processes {
		settingUp.Go(func() {
			c, err := inboxnats.NewConsumer(natstest.New(t), inboxnats.Stream{Name: name, Partitions: partitions}, inbox.NewMux(),
				inbox.ConsumerConfig{Name: billing, Ordered: true, Logger: slog.New(slog.DiscardHandler)})
			if err == nil {
				err = c.Setup(t.Context())
			}
			if err != nil {
				t.Error(err)
			}
		})
	}
	settingUp.Wait()
	close(ready)
	publishing.Wait()
	stream, err := js.Stream(t.Context(), name)
	noError(t, err)
	pending := map[string]uint64{}
	for info := range stream.ListConsumers(t.Context()).Info() {
		pending[info.Name] = info.NumPending
	}
	if len(pending) != partitions {
		t.Errorf("consumers %v, want %d", pending, partitions)
	}
	for i := range partitions {
		if got, want := pending[fmt.Sprintf("%s=%d", billing, i)], uint64(confirmed[i].Load()); got != want || want < 10 {
			t.Errorf("partition %d has %d messages, %d were confirmed", i, got, want)
		}
	}
}

// The process that opened the stream has ended before it gave the stream its subjects: one of the others does it.
func TestSetup_afterInterrupted(t *testing.T) {
	t.Parallel()
	conn := natstest.New(t)
	name, js := natstest.Name(t, conn), natstest.JetStream(t, conn)
	_, err := js.CreateStream(t.Context(), jetstream.StreamConfig{
		Name: name, Subjects: []string{"holdfast." + name + ".setup"}, Retention: jetstream.InterestPolicy,
	})
	noError(t, err)
	_, err = js.Publish(t.Context(), "holdfast."+name+".setup", nil)
	noError(t, err)
	c, err := inboxnats.NewConsumer(conn, inboxnats.Stream{Name: name}, inbox.NewMux(), inbox.ConsumerConfig{Name: billing})
	noError(t, err)
	if err := c.Check(t.Context()); err == nil || !strings.Contains(err.Error(), "has no subjects yet") || strings.Contains(err.Error(), "takes no message of subject") {
		t.Errorf("the findings before Setup are %v", err)
	}
	updates, err := conn.SubscribeSync("$JS.API.STREAM.UPDATE." + name)
	noError(t, err)
	noError(t, conn.Flush())
	var all sync.WaitGroup
	for range 4 {
		c, err := inboxnats.NewConsumer(natstest.New(t), inboxnats.Stream{Name: name, Timeout: 2 * time.Second}, inbox.NewMux(), inbox.ConsumerConfig{Name: billing})
		noError(t, err)
		all.Go(func() {
			if err := errors.Join(c.Setup(t.Context()), c.Check(t.Context())); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	noError(t, conn.Flush())
	if n, _, err := updates.Pending(); n != 1 || err != nil {
		t.Errorf("%d updates of the stream, want 1, error %v", n, err)
	}
	_, err = js.Publish(t.Context(), name+".order.placed", nil)
	noError(t, err)
}

// The process that opened the stream has ended before it created the consumers: the next Setup creates them, with the
// messages since then, and ends the temporary consumer.
func TestSetup_endsTemporaryConsumer(t *testing.T) {
	t.Parallel()
	conn := natstest.New(t)
	name, js := natstest.Name(t, conn), natstest.JetStream(t, conn)
	_, err := js.CreateStream(t.Context(), jetstream.StreamConfig{Name: name, Subjects: []string{name + ".>"}, Retention: jetstream.InterestPolicy})
	noError(t, err)
	_, err = js.CreateConsumer(t.Context(), name, jetstream.ConsumerConfig{Durable: billing + "=setup", AckPolicy: jetstream.AckExplicitPolicy})
	noError(t, err)
	_, err = js.Publish(t.Context(), name+".order.placed", nil)
	noError(t, err)
	c, err := inboxnats.NewConsumer(conn, inboxnats.Stream{Name: name}, inbox.NewMux(), inbox.ConsumerConfig{Name: billing})
	noError(t, err)
	noError(t, c.Setup(t.Context()))
	stream, err := js.Stream(t.Context(), name)
	noError(t, err)
	pending := map[string]uint64{}
	for info := range stream.ListConsumers(t.Context()).Info() {
		pending[info.Name] = info.NumPending
	}
	if want := map[string]uint64{billing: 1}; !maps.Equal(pending, want) {
		t.Errorf("consumers with messages %v, want %v", pending, want)
	}
}
