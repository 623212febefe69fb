package inboxtest_test

import (
	"cmp"
	"context"
	"crypto/rand"
	"log/slog"
	"os"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxtest"
	"github.com/holdfast-go/holdfast/internal/ids"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

type processor func(ctx context.Context, m *inbox.Message) error

func (p processor) Process(ctx context.Context, msgs []*inbox.Message) []error {
	results := make([]error, len(msgs))
	for i, m := range msgs {
		results[i] = p(ctx, m)
	}
	return results
}

// rig is a broker with one queue and its consumer.
type rig struct {
	*inboxtest.Broker
	*inboxtest.Consumer
}

func newRig(t *testing.T, p inbox.Processor, cfg inboxtest.Config) rig {
	t.Helper()
	b := inboxtest.NewBroker()
	c, err := inboxtest.NewConsumer(b, "inbox", p, cfg)
	noError(t, err)
	return rig{b, c}
}

// bubble runs a test with a consumer at work; stop ends its Run and waits for it.
func bubble(t *testing.T, p processor, cfg inboxtest.Config, test func(t *testing.T, b rig, stop func())) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		cfg.Concurrency = cmp.Or(cfg.Concurrency, 1)
		cfg.Rand = func() float64 { return 0.5 }
		cfg.Logger = slog.New(slog.DiscardHandler)
		b := newRig(t, p, cfg)
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

func publish(t *testing.T, b rig, names ...string) (published []uuid.UUID) {
	t.Helper()
	for _, name := range names {
		// Of the bubble's time: ids.New does not go back behind what it gave outside.
		id := ids.Deterministic(time.Now(), rand.Text())
		m := &inbox.Message{ID: id, Name: name, Body: []byte(`{}`), Attempt: 7, Queue: "elsewhere"}
		noError(t, b.Send(t.Context(), m))
		published = append(published, m.ID)
	}
	return published
}

func idle(t *testing.T, b rig) {
	t.Helper()
	noError(t, b.Idle(t.Context()))
}

func letters(t *testing.T, b rig, f inbox.Filter) []inbox.DeadLetter {
	t.Helper()
	found, err := b.DeadLetters().List(t.Context(), f)
	noError(t, err)
	return found
}

func noError(t testing.TB, errs ...error) {
	t.Helper()
	for _, err := range errs {
		if err != nil {
			t.Fatal(err)
		}
	}
}

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }
