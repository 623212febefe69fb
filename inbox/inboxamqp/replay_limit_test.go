package inboxamqp_test

import (
	"errors"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/inbox"
)

// A replay in portions gets on although the first ones have to stay: they are at the head each time.
func TestReplayInPortions(t *testing.T) {
	t.Parallel()
	b := withDeadLetters(t)
	foreign := order()
	foreign.Headers = amqp.Table{"x-of": "somebody else"}
	b.Publish(t, "", "failed.default", foreign)
	for _, age := range []time.Duration{9 * 24 * time.Hour, 10 * 24 * time.Hour, 0, 0, 0} {
		b.Publish(t, "", "failed.default", deadOrder(age))
	}
	letters := newDeadLetters(t, b, config{})
	for _, want := range []inbox.Replayed{
		{Returned: 2, Outlived: 2, Failed: 1}, {Returned: 1, Outlived: 2, Failed: 1}, {Outlived: 2, Failed: 1},
	} {
		dry, err := letters.Replay(t.Context(), inbox.Filter{Limit: 2}, inbox.Replay{DryRun: true})
		if dry != want || !errors.Is(err, inbox.ErrOutlived) {
			t.Errorf("dry run: %+v, error %v; want %+v", dry, err, want)
		}
		if got, err := letters.Replay(t.Context(), inbox.Filter{Limit: 2}, inbox.Replay{By: "test"}); got != want || err == nil {
			t.Errorf("returned %+v, error %v; want %+v", got, err, want)
		}
	}
	awaitDepth(t, b, "orders", 3)
}

// A limit that was computed and fell below zero is no licence to take all.
func TestNegativeLimit(t *testing.T) {
	t.Parallel()
	b := withDeadLetters(t)
	b.Publish(t, "", "failed.default", deadOrder(0))
	letters := newDeadLetters(t, b, config{})
	filter := inbox.Filter{Limit: -1}
	if n, err := letters.Remove(t.Context(), filter, inbox.Removal{By: "test"}); n != 0 || err == nil {
		t.Errorf("removed %d, error %v", n, err)
	}
	if n, err := letters.Replay(t.Context(), filter, inbox.Replay{By: "test"}); n.Returned != 0 || err == nil {
		t.Errorf("returned %+v, error %v", n, err)
	}
	if found, err := letters.List(t.Context(), filter); len(found) != 0 || err == nil {
		t.Errorf("listed %d, error %v", len(found), err)
	}
	awaitDepth(t, b, "failed.default", 1)
}
