package conformance

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
)

func testDone(t *testing.T, f Fixture) {
	p := f.Processor(t, "a", succeed)
	mustProcess(t, p, event(1))
	mustProcess(t, p, event(2))
	wantEffects(t, f, "a", 1, 1)
	wantEffects(t, f, "a", 2, 1)
}

func testDuplicate(t *testing.T, f Fixture) {
	runs := 0
	count := func(context.Context, Event) error { runs++; return nil }
	m := event(1)
	mustProcess(t, f.Processor(t, "a", count), m)
	mustProcess(t, f.Processor(t, "a", count), m) // another process of the same consumer
	wantEffects(t, f, "a", 1, 1)
	if runs != 1 {
		t.Errorf("the handler ran %d times", runs)
	}
}

func testRetry(t *testing.T, f Fixture) {
	boom := errors.New("boom")
	fail := true
	p := f.Processor(t, "a", func(context.Context, Event) error {
		if fail {
			return boom
		}
		return nil
	})
	m := event(1)
	for range 2 {
		if err := process(t.Context(), t, p, m); !errors.Is(err, boom) {
			t.Fatalf("error = %v, want the handler's", err)
		}
	}
	wantEffects(t, f, "a", 1, 0)
	fail = false
	mustProcess(t, p, m)
	wantEffects(t, f, "a", 1, 1)
}

func testMarkers(t *testing.T, f Fixture) {
	boom := errors.New("boom")
	var result error
	p := f.Processor(t, "a", func(context.Context, Event) error { return result })
	for _, result = range []error{
		boom, inbox.Unrecoverable(boom), inbox.RetryAfter(boom, time.Minute),
		inbox.Classed(boom, "payment"), fmt.Errorf("a: %w", inbox.Invalid(boom)), inbox.Postpone(boom, 1),
	} {
		err := process(t.Context(), t, p, event(1))
		got, want := driver.Classify(err), driver.Classify(result)
		got.Err, want.Err = nil, nil
		if got != want || !errors.Is(err, boom) {
			t.Errorf("handler's %v came back as %v: %+v, want %+v", result, err, got, want)
		}
	}
}

func testConsumers(t *testing.T, f Fixture) {
	m := event(1)
	for _, consumer := range []string{"a", "b", "a"} {
		mustProcess(t, f.Processor(t, consumer, succeed), m)
	}
	wantEffects(t, f, "a", 1, 1)
	wantEffects(t, f, "b", 1, 1)
}

func testConcurrentDuplicates(t *testing.T, f Fixture) {
	const copies = 8
	m := event(1)
	p := f.Processor(t, "a", succeed)
	var wg sync.WaitGroup
	for range copies {
		wg.Go(func() { untilDone(t, p, m) })
	}
	wg.Wait()
	wantEffects(t, f, "a", 1, 1)
}

// untilDone delivers a message as a broker would until it is acknowledged.
func untilDone(t *testing.T, p inbox.Processor, m *inbox.Message) {
	for {
		results := p.Process(t.Context(), []*inbox.Message{m})
		failure := driver.Classify(results[0])
		if results[0] == nil {
			return
		}
		if failure.Counted || failure.Action == driver.ActionDead {
			t.Errorf("a concurrent copy counts as a failure: %v", results[0])
			return
		}
		select {
		case <-time.After(10 * time.Millisecond):
		case <-t.Context().Done():
			return
		}
	}
}
