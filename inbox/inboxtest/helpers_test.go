package inboxtest_test

import (
	"context"
	"crypto/rand"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxtest"
	"github.com/holdfast-go/holdfast/internal/ids"
)

type processor func(ctx context.Context, m *inbox.Message) error

func (p processor) Process(ctx context.Context, msgs []*inbox.Message) []error {
	results := make([]error, len(msgs))
	for i, m := range msgs {
		results[i] = p(ctx, m)
	}
	return results
}

// bubble runs a test with a broker at work; stop ends its Run and waits for it.
func bubble(t *testing.T, p processor, cfg inboxtest.Config, test func(t *testing.T, b *inboxtest.Broker, stop func())) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		cfg.Rand = func() float64 { return 0.5 }
		cfg.Logger = slog.New(slog.DiscardHandler)
		b, err := inboxtest.NewBroker(p, cfg)
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			if err := b.Run(ctx); err != nil {
				t.Errorf("Run: %v", err)
			}
		}()
		stop := func() {
			cancel()
			<-ended
		}
		defer stop()
		synctest.Wait()
		test(t, b, stop)
	})
}

func publish(t *testing.T, b *inboxtest.Broker, names ...string) (published []uuid.UUID) {
	t.Helper()
	for _, name := range names {
		// Of the bubble's time: ids.New does not go back behind what it gave outside.
		id := ids.Deterministic(time.Now(), rand.Text())
		m := &inbox.Message{ID: id, Name: name, Body: []byte(`{}`), Attempt: 7, Queue: "elsewhere"}
		if err := b.Publish(t.Context(), m); err != nil {
			t.Fatal(err)
		}
		published = append(published, m.ID)
	}
	return published
}

func idle(t *testing.T, b *inboxtest.Broker) {
	t.Helper()
	if err := b.Idle(t.Context()); err != nil {
		t.Fatal(err)
	}
}

func letters(t *testing.T, b *inboxtest.Broker, f inbox.Filter) []inbox.DeadLetter {
	t.Helper()
	found, err := b.DeadLetters().List(t.Context(), f)
	if err != nil {
		t.Fatal(err)
	}
	return found
}
