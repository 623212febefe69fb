package inboxredis_test

import (
	"context"
	"errors"
	"log/slog"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
	"github.com/holdfast-go/holdfast/inbox/inboxredis"
	"github.com/holdfast-go/holdfast/inbox/inboxtest"
	"github.com/holdfast-go/holdfast/inbox/inboxtest/conformance"
	"github.com/holdfast-go/holdfast/internal/redistest"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

// pausesSeen tells when a consumer logs that an operator has paused it.
type pausesSeen struct {
	slog.Handler
	seen chan struct{}
}

func (pausesSeen) Enabled(context.Context, slog.Level) bool { return true }

func (p pausesSeen) WithAttrs([]slog.Attr) slog.Handler { return p }

func (p pausesSeen) Handle(_ context.Context, r slog.Record) error {
	if r.Message == "paused by an operator" {
		p.seen <- struct{}{}
	}
	return nil
}

// An operator pauses a store also where Redis is asked before it.
func TestPauseOfTheStoreBehind(t *testing.T) {
	t.Parallel()
	client := redistest.New(t)
	store, err := inboxtest.New(txretrytest.New(txretrytest.Config{}), groupName, inboxpgx.Config{})
	if err != nil {
		t.Fatal(err)
	}
	handled := make(chan struct{}, 10)
	err = inboxpgx.Handle(store, conformance.Name, func(context.Context, pgx.Tx, conformance.Event) error {
		handled <- struct{}{}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	p, err := inboxredis.NewProcessor(client, store, inboxredis.ProcessorConfig{})
	if err != nil {
		t.Fatal(err)
	}
	if err := store.Pause(t.Context(), "ada", "a test"); err != nil {
		t.Fatal(err)
	}
	paused := make(chan struct{}, 10)
	c := newConsumer(t, client, p, inboxredis.Config{ConsumerConfig: inbox.ConsumerConfig{Logger: slog.New(pausesSeen{seen: paused})}})
	publish(t, client, event())
	defer start(t, c)()
	select {
	case <-paused:
	case <-handled:
		t.Fatal("a message is processed during the pause")
	case <-time.After(patience):
		t.Fatal("the consumer does not learn of the pause")
	}
	if err := store.Resume(t.Context()); err != nil {
		t.Fatal(err)
	}
	awaitHandled(t, handled)
}

// A processor that cannot be paused does not keep its consumer waiting for a word of a pause.
func TestNoPauseOfAMuxBehind(t *testing.T) {
	t.Parallel()
	client := redistest.New(t)
	handled := make(chan struct{}, 10)
	p := newProcessor(t, client, inboxredis.ProcessorConfig{}, func(context.Context, conformance.Event) error {
		handled <- struct{}{}
		return nil
	})
	c := newConsumer(t, client, p, inboxredis.Config{})
	publish(t, client, event())
	defer start(t, c)()
	awaitHandled(t, handled)

	paused, err := p.Paused(t.Context())
	if err != nil || paused != (driver.Pause{}) {
		t.Errorf("it is paused: %+v, %v", paused, err)
	}
	for what, err := range map[string]error{"Pause": p.Pause(t.Context(), "ada", ""), "Resume": p.Resume(t.Context())} {
		if !errors.Is(err, errors.ErrUnsupported) {
			t.Errorf("%s: %v", what, err)
		}
	}
}

func awaitHandled(t *testing.T, handled <-chan struct{}) {
	t.Helper()
	select {
	case <-handled:
	case <-time.After(patience):
		t.Fatal("no message is processed")
	}
}
