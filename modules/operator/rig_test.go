package operator_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/expiry"
	"github.com/holdfast-go/holdfast/expiry/expirytest"
	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
	"github.com/holdfast-go/holdfast/inbox/inboxtest"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/modules/operator"
	"github.com/holdfast-go/holdfast/modules/operator/command"
	"github.com/holdfast-go/holdfast/modules/operator/internal/core"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/outboxtest"
	"github.com/holdfast-go/holdfast/ratelimit"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

func TestMain(m *testing.M) {
	core.RatesApart, core.LiveEvery = 10*time.Millisecond, 200*time.Millisecond
	os.Exit(testenv.Run(m))
}

var quiet = slog.New(slog.DiscardHandler)

// rig is a service on fakes: an outbox with the dead letters a and b, a consumer with the dead letters
// c, c and d, two overdue holds, and a limit of ten.
type rig struct {
	cfg     operator.Config
	ids     map[string]uuid.UUID // of a, b and d
	limiter *ratelimit.Memory
	relay   *outbox.Relay
	broker  *inboxtest.Broker
	take    func(*testing.T)  // has the consumer take what the broker holds
	sent    map[string]string // bodies of what was published, by name
	mended  bool
	write   func(name string, notBefore time.Time) // stores a message in the outbox
}

// published mends what fails, publishes what waits and returns the body of a message.
func (r *rig) published(t *testing.T, name string) string {
	t.Helper()
	r.mended = true
	_, err := r.relay.Drain(t.Context(), outbox.Bounds{})
	check(t, err)
	return r.sent[name]
}

func newRig(t *testing.T) *rig {
	t.Helper()
	r := &rig{ids: map[string]uuid.UUID{}, sent: map[string]string{}}
	manager := txretrytest.New(txretrytest.Config{})
	store, publisher, broker := outboxtest.New(), outboxtest.NewPublisher(), inboxtest.NewBroker()
	publisher.Respond(func(m driver.Message) error {
		if r.mended {
			r.sent[m.Name] = string(m.Body)
			return nil
		}
		return &driver.PublishError{Class: driver.Permanent, Err: fmt.Errorf("no exchange %s", m.Name)}
	})
	relay := must(outbox.NewRelay(store, publisher, outbox.RelayConfig{Retry: outbox.RetryPolicy{MaxAttempts: 1}, Logger: quiet}))(t)
	r.relay = relay
	r.write = func(name string, notBefore time.Time) {
		t.Helper()
		m := must(outbox.NewMessage(name, map[string]string{"secret": name}))(t)
		m.Key, m.Headers, m.NotBefore = "key "+name, map[string]string{"tenant": "x"}, notBefore
		if name == "b" {
			m.ContentType, m.Body = "text/plain", []byte("clears the screen:\x1b[2J")
		}
		r.ids[name] = m.ID
		check(t, manager.Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error { return store.Write(ctx, tx, m) }))
	}
	r.write("a", time.Time{})
	r.write("b", time.Time{})
	_, err := relay.Drain(t.Context(), outbox.Bounds{})
	check(t, err)

	mux := inbox.NewMux()
	mux.Fallback(func(_ context.Context, m *inbox.Message) error {
		if r.mended {
			return nil
		}
		return inbox.Unrecoverable(errors.New("no handler for " + m.Name))
	})
	consumer := must(inboxtest.NewConsumer(broker, "billing", mux, inboxtest.Config{ConsumerConfig: inbox.ConsumerConfig{Logger: quiet}}))(t)
	for _, name := range []string{"c", "c", "d"} {
		id := must(uuid.NewV7())(t)
		r.ids[name] = id
		check(t, broker.Send(t.Context(), &inbox.Message{ID: id, Name: name, Body: []byte("{}")}))
	}
	r.broker, r.take = broker, func(t *testing.T) {
		t.Helper()
		ctx, stop := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { ended <- consumer.Run(ctx) }()
		check(t, broker.Idle(t.Context()))
		stop()
		check(t, <-ended)
	}
	r.take(t)

	holds := must(expirytest.New(manager, expirytest.Config{}))(t)
	check(t, manager.Do(t.Context(), func(_ context.Context, tx pgx.Tx) error {
		for i := range 2 {
			if err := holds.Put(tx, fmt.Sprint(i), time.Now().Add(-time.Minute), "held"); err != nil {
				return err
			}
		}
		return nil
	}))
	r.limiter = must(ratelimit.NewMemory(ratelimit.MemoryConfig{}))(t)
	r.cfg = operator.Config{
		Outboxes:  []operator.Outbox{{Store: store, Relay: relay}},
		Consumers: []operator.Consumer{{Name: "billing", Consumer: consumer, Inbox: must(inboxtest.New(manager, "billing", inboxpgx.Config{}))(t)}},
		Sweeps:    []operator.Sweep{{Name: "holds", Store: holds, Sweeper: must(expiry.NewSweeper(holds, expiry.SweeperConfig{Logger: quiet}))(t)}},
		Limiters:  []operator.Limiter{{Name: "requests", Limiter: r.limiter, Limits: []ratelimit.Limit{{Name: "user", Max: 10}}}},
		Log:       &operator.MemoryLog{},
	}
	return r
}

func must[T any](v T, err error) func(*testing.T) T {
	return func(t *testing.T) T {
		t.Helper()
		check(t, err)
		return v
	}
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func (r *rig) run(t *testing.T, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	var out, errs bytes.Buffer
	code = command.Run(t.Context(), r.cfg, args, &out, &errs)
	return code, out.String(), errs.String()
}

// wants runs a command that must end with the code and print all parts.
func (r *rig) wants(t *testing.T, want int, args []string, parts ...string) (stdout string) {
	t.Helper()
	code, out, errs := r.run(t, args...)
	if code != want {
		t.Errorf("%q exits with %d, want %d: %s%s", args, code, want, out, errs)
	}
	for _, part := range parts {
		if !strings.Contains(out, part) {
			t.Errorf("%q prints %q, which lacks %q", args, out, part)
		}
	}
	return out
}
