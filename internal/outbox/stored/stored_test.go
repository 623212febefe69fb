package stored_test

import (
	"maps"
	"os"
	"testing"

	"github.com/holdfast-go/holdfast/internal/outbox/stored"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

func TestRulesPrecedence(t *testing.T) {
	t.Parallel()
	plain := stored.Rules{Exchange: "default", ByName: map[string]outbox.Route{
		"a": {RoutingKey: "config", Headers: map[string]string{"h": "config", "c": "1"}},
	}}
	routed := plain
	routed.Router = func(m outbox.Message) outbox.Route {
		return outbox.Route{RoutingKey: m.Key + "." + m.Route.RoutingKey, Headers: map[string]string{"r": "1", "h": "router"}}
	}
	own := driver.Message{
		Name: "a", Key: "k", Exchange: "own", RoutingKey: "own", RouteHeaders: map[string]string{"h": "own", "o": "1"},
	}
	other := own
	other.Name = "b"
	for name, tc := range map[string]struct {
		rules stored.Rules
		m     driver.Message
		want  outbox.Route
	}{
		"nothing":     {stored.Rules{}, driver.Message{Name: "x.y"}, outbox.Route{RoutingKey: "x.y"}},
		"convention":  {plain, driver.Message{Name: "b"}, outbox.Route{Exchange: "default", RoutingKey: "b"}},
		"the message": {plain, driver.Message{Name: "b", Exchange: "own"}, outbox.Route{Exchange: "own", RoutingKey: "b"}},
		"ByName before the message": {plain, own, outbox.Route{
			Exchange: "own", RoutingKey: "config", Headers: map[string]string{"h": "config", "c": "1", "o": "1"},
		}},
		"Router in place of the message": {routed, other, outbox.Route{
			Exchange: "default", RoutingKey: "k.own", Headers: map[string]string{"h": "router", "r": "1"},
		}},
		"ByName before Router": {routed, own, outbox.Route{
			Exchange: "default", RoutingKey: "config", Headers: map[string]string{"h": "config", "c": "1", "r": "1"},
		}},
	} {
		got := tc.rules.Route(tc.m)
		if got.Exchange != tc.want.Exchange || got.RoutingKey != tc.want.RoutingKey || !maps.Equal(got.Headers, tc.want.Headers) {
			t.Errorf("%s: %+v, want %+v", name, got, tc.want)
		}
	}
}
