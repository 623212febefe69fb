package core

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	inboxdriver "github.com/holdfast-go/holdfast/inbox/driver"
)

// Lookups run one after the other, at most ten a second, and take at most half of the time. One that waits for its turn ends
// with its context.
func TestPace(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p := pace{turn: make(chan struct{}, 1)}
		began := time.Now()
		for range 11 {
			leave, err := p.enter(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			if _, err := p.enter(ctx); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("a second lookup began: %v", err)
			}
			cancel()
			leave()
		}
		if passed := time.Since(began); passed < 21*time.Minute {
			t.Errorf("eleven lookups of a minute ended after %v", passed)
		}
		time.Sleep(time.Minute)
		began = time.Now()
		for range 10 {
			leave, err := p.enter(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			leave()
		}
		if passed := time.Since(began); passed < 9*storyEvery {
			t.Errorf("ten lookups began within %v", passed)
		}
	})
}

func TestRunOf(t *testing.T) {
	t.Parallel()
	now := time.Now()
	for run, want := range map[inboxdriver.LedgerEntry]string{
		{Attempt: 3}:                         "attempt 3: waits for its time",
		{Attempt: 2, Overdue: time.Second}:   "attempt 2: due",
		{Open: 1, Overdue: time.Second}:      "attempt 1: started; it runs, or its process died",
		{Attempt: 1, Open: 2}:                "attempt 1: started 2 times without an end; processes may have died",
		{Attempt: 1, Replays: 1, Overdue: 1}: "attempt 1: due",
	} {
		e := runOf("billing", run, now)
		if got := e.What + ": " + e.Detail; got != want || e.At.IsZero() == (run.Overdue > 0) {
			t.Errorf("%+v: %s at %v, want %s", run, got, e.At, want)
		}
	}
}

func TestMessage_traceID(t *testing.T) {
	t.Parallel()
	const id = "4bf92f3577b34da6a3ce929d0e0e4736"
	for parent, want := range map[string]string{
		"00-" + id + "-00f067aa0ba902b7-01": id,
		"":                                  "",
		"00-" + id:                          "",
		"00-00000000000000000000000000000000-00f067aa0ba902b7-01": "",
		`00-4bf92f3577b34da6a3ce929d0e0e473"-00f067aa0ba902b7-01`: "",
	} {
		m := Message{Headers: map[string]string{"traceparent": parent}}
		if got := m.TraceID(); got != want {
			t.Errorf("%q: %q, want %q", parent, got, want)
		}
	}
}
