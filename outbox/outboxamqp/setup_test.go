package outboxamqp_test

import (
	"context"
	"errors"
	"log/slog"
	"runtime"
	"strings"
	"sync"
	"testing"

	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/amqptest"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/outboxamqp"
)

func TestSetupAndCheck(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	p := newPublisher(t, b.Dial, outboxamqp.Config{Exchange: "events"})
	if err := p.Check(t.Context()); err == nil || !strings.Contains(err.Error(), `"events"`) {
		t.Fatalf("found %v", err)
	}
	fanout := newPublisher(t, b.Dial, outboxamqp.Config{Exchange: "fanout"})
	b.Exchange(t, "fanout", "fanout")
	must(t, fanout.Setup(t.Context())) // an exchange is used as it is
	for range 2 {
		must(t, p.Setup(t.Context()))
	}
	if err := p.Check(t.Context()); err != nil {
		t.Errorf("after Setup: %v", err)
	}
	if err := p.Ready(t.Context()); err == nil {
		t.Error("ready without Run")
	}
}

// Check follows Exchange and Routes, and ignores the possible choices of a Router.
func TestCheckFollowsTheRoutes(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	b.Exchange(t, "default", "topic")
	b.Queue(t, "there", nil)
	p := newPublisher(t, b.Dial, outboxamqp.Config{Exchange: "default", Routes: map[string]outbox.Route{
		"a": {Exchange: "missing"}, "b": {RoutingKey: "x"},
	}})
	direct := newPublisher(t, b.Dial, outboxamqp.Config{Routes: map[string]outbox.Route{
		"there": {}, "x": {RoutingKey: "there"}, "y": {RoutingKey: "nowhere"}, "z": {},
	}})
	routed := newPublisher(t, b.Dial, outboxamqp.Config{
		Routes: map[string]outbox.Route{"a": {Exchange: "missing"}, "z": {}},
		Router: func(outbox.Message) outbox.Route { return outbox.Route{Exchange: "default"} },
	})
	for _, tt := range []struct {
		p    *outboxamqp.Publisher
		want []string
	}{
		{p, []string{`exchange "missing" does not exist`}},
		{routed, []string{`exchange "missing" does not exist`}},
		{direct, []string{
			`queue "nowhere" does not exist, to which messages "y" go by the default exchange`,
			`queue "z" does not exist, to which messages "z" go by the default exchange`,
		}},
	} {
		found, ok := tt.p.Check(t.Context()).(interface{ Unwrap() []error })
		if !ok || len(found.Unwrap()) != len(tt.want) {
			t.Fatalf("found %v, want %q", found, tt.want)
		}
		for i, err := range found.Unwrap() {
			finding, ok := err.(interface{ Fix() string })
			if !ok || finding.Fix() == "" || !strings.Contains(err.Error(), tt.want[i]) {
				t.Errorf("found %v, want %s", err, tt.want[i])
			}
		}
	}
	if depth := b.Depth(t, "there"); depth != 0 {
		t.Errorf("Check has published %d messages", depth)
	}
}

// exits is a log handler that ends the goroutine of the caller.
type exits struct{ slog.Handler }

func (e exits) Handle(context.Context, slog.Record) error {
	runtime.Goexit()
	return nil
}

func (e exits) WithAttrs([]slog.Attr) slog.Handler { return e }

// The Done channel of context.Background is nil; Run must work with it.
func TestRunOnBackground(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	b.Queue(t, "q", nil)
	// Only the log line about a lost connection ends Run.
	p := newPublisher(t, b.Dial, outboxamqp.Config{Logger: slog.New(exits{slog.Default().Handler()})})
	var running sync.WaitGroup
	running.Go(func() {
		if err := p.Run(context.Background()); err != nil {
			t.Error(err)
		}
	})
	testenv.Eventually(t, func() error { return publish(t, p, message(t, "q")) })
	if err := p.Ready(t.Context()); err != nil {
		t.Error(err)
	}
	b.CloseConnections(t)
	running.Wait()
}

// A message with a key has the key's slot as a second routing key, in the header CC. RabbitMQ 4 checks
// topic permissions of that key, too; RabbitMQ 3 does not.
func TestTopicPermissions_keysOfSlots(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	b.Exchange(t, "events", "topic")
	b.Queue(t, "q", nil)
	b.Bind(t, "q", "order.#", "events")
	publisher := func(name, topics string) *outboxamqp.Publisher {
		user := b.User(t, name, amqptest.Rights{Write: "^events$", Topics: map[string]string{"events": topics}})
		return running(t, user.Dial, outboxamqp.Config{Exchange: "events"})
	}
	keyed := message(t, "order.placed")
	keyed.Key = "customer-7"
	plain := message(t, "order.placed")

	// A user who is allowed the slots, as the guide says, publishes both on every version.
	allowed := publisher("allowed", `^(order|holdfast\.slot)\.`)
	for _, m := range []driver.Message{keyed, plain} {
		if err := publish(t, allowed, m); err != nil {
			t.Errorf("key %q: %v", m.Key, err)
		}
	}
	// Without that right, the broker decides over the keyed message alone: the others pass.
	without := publisher("without", `^order\.`)
	arrived := 2
	for range 3 {
		var refused *driver.PublishError
		if err := publish(t, without, keyed); err == nil {
			arrived++
		} else if !errors.As(err, &refused) || refused.Class != driver.Unroutable {
			t.Errorf("key %q: %v, want it unroutable", keyed.Key, err)
		}
		if err := publish(t, without, plain); err != nil {
			t.Errorf("without a key: %v", err)
		}
		arrived++
	}
	for _, d := range b.Take(t, "q", arrived, testenv.Patience) {
		if d.RoutingKey != "order.placed" {
			t.Errorf("routing key %q", d.RoutingKey)
		}
	}
}
