package outboxamqp_test

import (
	"strings"
	"testing"

	"github.com/holdfast-go/holdfast/internal/amqptest"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/outboxamqp"
)

func TestSetupAndCheck(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	p, err := outboxamqp.NewPublisher(b.Dial, outboxamqp.Config{Exchange: "events"})
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Check(t.Context()); err == nil || !strings.Contains(err.Error(), `"events"`) {
		t.Fatalf("found %v", err)
	}
	for range 2 {
		if err := p.Setup(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if err := p.Check(t.Context()); err != nil {
		t.Errorf("after Setup: %v", err)
	}
	if err := p.Ready(t.Context()); err == nil {
		t.Error("ready without Run")
	}
}

// Check finds what Exchange and Routes lead to, and nothing that a Router may choose.
func TestCheckFollowsTheRoutes(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	b.Exchange(t, "default", "topic")
	b.Queue(t, "there", nil)
	p, err := outboxamqp.NewPublisher(b.Dial, outboxamqp.Config{Exchange: "default", Routes: map[string]outbox.Route{
		"a": {Exchange: "missing"}, "b": {RoutingKey: "x"},
	}})
	if err != nil {
		t.Fatal(err)
	}
	direct, err := outboxamqp.NewPublisher(b.Dial, outboxamqp.Config{Routes: map[string]outbox.Route{
		"there": {}, "x": {RoutingKey: "there"}, "y": {RoutingKey: "nowhere"}, "z": {},
	}})
	if err != nil {
		t.Fatal(err)
	}
	routed, err := outboxamqp.NewPublisher(b.Dial, outboxamqp.Config{
		Routes: map[string]outbox.Route{"a": {Exchange: "missing"}, "z": {}},
		Router: func(outbox.Message) outbox.Route { return outbox.Route{Exchange: "default"} },
	})
	if err != nil {
		t.Fatal(err)
	}
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
			finding, ok := err.(interface{ Mend() string })
			if !ok || finding.Mend() == "" || !strings.Contains(err.Error(), tt.want[i]) {
				t.Errorf("found %v, want %s", err, tt.want[i])
			}
		}
	}
	if depth := b.Depth(t, "there"); depth != 0 {
		t.Errorf("Check has published %d messages", depth)
	}
}

// Existing exchanges are used as they are.
func TestSetupFindsExchange(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	b.Exchange(t, "events", "fanout")
	p, err := outboxamqp.NewPublisher(b.Dial, outboxamqp.Config{Exchange: "events"})
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Setup(t.Context()); err != nil {
		t.Error(err)
	}
}
