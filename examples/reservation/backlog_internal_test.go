package main

import (
	"context"
	"errors"
	"reflect"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/examples/reservation/internal/flow"
	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
)

// TestBacklogTellsWhatItKnows wants no number before a server has told it, nor long after.
func TestBacklogTellsWhatItKnows(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var noOutbox, noQueue error
		b := &backlog{
			outbox: func(context.Context) (driver.Depth, error) {
				return driver.Depth{Ready: 1, Parked: 2, Dead: 3}, noOutbox
			},
			queue: func(context.Context) (inbox.Stats, error) {
				return inbox.Stats{Waiting: 4, Retrying: 5, Dead: map[string]int{"validation": 6}}, noQueue
			},
			inHand: func() int64 { return 7 },
		}
		ctx, stop := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { ended <- b.Run(ctx) }()
		// wants looks for as long as somebody would, and wants the last look to be so.
		wants := func(when string, seconds int, want flow.Backlog) {
			t.Helper()
			var got flow.Backlog
			for range seconds {
				_, _ = b.Look(ctx) // it does not fail
				time.Sleep(time.Second)
				synctest.Wait()
				got, _ = b.Look(ctx)
			}
			if !reflect.DeepEqual(got, want) {
				t.Errorf("%s: %+v", when, got)
			}
		}
		outage := errors.New("no answer")
		all := flow.Backlog{Outbox: new(3), Queue: new(16), Dead: new(9)}

		if got, err := b.Look(ctx); err != nil || got != (flow.Backlog{}) {
			t.Errorf("at first: %+v, %v", got, err)
		}
		wants("both answer", 1, all)
		noOutbox = outage
		wants("the outbox is away for a moment", 2, all)
		wants("the outbox is away", 5, flow.Backlog{Queue: new(16)})
		noOutbox, noQueue = nil, outage
		wants("the queue is away", 7, flow.Backlog{Outbox: new(3)})
		noQueue = nil
		wants("both are back", 1, all)
		time.Sleep(time.Minute)
		if got, err := b.Look(ctx); err != nil || got != (flow.Backlog{}) {
			t.Errorf("nobody has looked for a minute: %+v, %v", got, err)
		}
		stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}
