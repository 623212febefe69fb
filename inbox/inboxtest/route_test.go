package inboxtest_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxtest"
	"github.com/holdfast-go/holdfast/internal/ids"
	"github.com/holdfast-go/holdfast/outbox/driver"
)

var _ driver.Publisher = (*inboxtest.Broker)(nil)

func TestNames(t *testing.T) {
	t.Parallel()
	for pattern, names := range map[string]map[string]bool{
		"":             {"": true, "a": true, "order.placed": true}, // no pattern
		"order.placed": {"order.placed": true, "order.placed.v2": false, "order": false},
		"order.*":      {"order.placed": true, "order": false, "order.a.b": false, "user.a": false},
		"order.#":      {"order.placed": true, "order": true, "order.a.b": true, "orders.a": false},
		"#.placed":     {"order.placed": true, "placed": true, "a.b.placed": true, "placed.a": false},
		"*.placed.#":   {"order.placed": true, "order.placed.v2": true, "placed": false},
	} {
		cfg := inboxtest.Config{}
		if pattern != "" {
			cfg.Names = []string{pattern}
		}
		b := newRig(t, inbox.NewMux(), cfg)
		for name, want := range names {
			m := &inbox.Message{ID: ids.New(), Name: name}
			if err := b.Send(t.Context(), m); (err == nil) != want {
				t.Errorf("%q to a queue for %q: %v", name, pattern, err)
			}
		}
	}
}

// A relay's message comes to each queue that wants it, as the consumer's message; without any it
// is unroutable.
func TestPublish(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		broker := inboxtest.NewBroker()
		var got [2][]*inbox.Message
		ctx, stop := context.WithCancel(t.Context())
		defer synctest.Wait()
		defer stop()
		for i, queue := range []string{"billing", "mail"} {
			p := processor(func(_ context.Context, m *inbox.Message) error { got[i] = append(got[i], m); return nil })
			c, err := inboxtest.NewConsumer(broker, queue, p, inboxtest.Config{Names: []string{"order.*"}})
			if err != nil {
				t.Fatal(err)
			}
			go func() { _ = c.Run(ctx) }()
		}
		created := time.Now()
		publish := func(ctx context.Context, name string) (err error) {
			broker.Publish(ctx, driver.Message{
				ID: uuid.Must(uuid.NewV7()), Name: name, Body: []byte("{}"), ContentType: "application/json",
				Headers: map[string]string{"a": "b"}, CreatedAt: created, Key: "customer-7",
			}, func(e error) { err = e })
			return err
		}
		if err := publish(t.Context(), "order.placed"); err != nil {
			t.Fatal(err)
		}
		if err := broker.Idle(t.Context()); err != nil {
			t.Fatal(err)
		}
		for i, queue := range []string{"billing", "mail"} {
			if len(got[i]) != 1 {
				t.Fatalf("%s got %d messages", queue, len(got[i]))
			}
			if m := got[i][0]; m.Queue != queue || m.Name != "order.placed" || string(m.Body) != "{}" || m.Headers["a"] != "b" ||
				m.ContentType != "application/json" || !m.PublishedAt.Equal(created) || m.Attempt != 1 || m.Key != "customer-7" {
				t.Errorf("%s got %+v", queue, m)
			}
		}
		if err := publish(t.Context(), "user.left"); driver.ClassOf(err) != driver.Unroutable {
			t.Errorf("without a queue: %v", err)
		}
		for name, err := range map[string]error{
			"large body": send(t, broker, &inbox.Message{Name: "order.placed", Body: make([]byte, 16<<20+1)}),
			"long name":  send(t, broker, &inbox.Message{Name: "order." + strings.Repeat("x", 250)}),
			"headers":    send(t, broker, &inbox.Message{Name: "order.placed", Headers: map[string]string{"a": strings.Repeat("x", 130<<10)}}),
		} {
			if err == nil {
				t.Errorf("%s: taken", name)
			}
		}
		ended, cancel := context.WithCancel(t.Context())
		cancel()
		if err := publish(ended, "order.placed"); driver.ClassOf(err) != driver.Unavailable || !errors.Is(err, context.Canceled) {
			t.Errorf("with a context that has ended: %v", err)
		}
	})
}

func send(t *testing.T, b *inboxtest.Broker, m *inbox.Message) error {
	t.Helper()
	return b.Send(t.Context(), m)
}
