package conformance

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/inbox/driver"
)

// What no consumer has is counted: what was never delivered, what was given back, and what waits for
// its next attempt. What a consumer has is not.
func testSourceBacklog(t *testing.T, f SourceFixture) {
	source := running(t, f)
	measured, ok := source.(driver.Measured)
	if !ok {
		t.Fatal("the source does not count its messages")
	}
	wants := func(what string, fits func(driver.Backlog) bool) {
		t.Helper()
		await(t, func() error {
			got, err := measured.Backlog(t.Context())
			if err == nil && !fits(got) {
				err = fmt.Errorf("%s: the backlog is %+v", what, got)
			}
			return err
		})
	}
	wants("nothing sent", func(b driver.Backlog) bool { return b == driver.Backlog{} })
	numbered(t, f, 4)
	wants("4 sent", func(b driver.Backlog) bool { return b == driver.Backlog{Waiting: 4} })
	s := begin(t, source, 3)
	ds := take(t, s, 3)
	wants("3 taken", func(b driver.Backlog) bool { return b == driver.Backlog{Waiting: 1} })
	moved(t, source, s, later(ds[0], time.Hour, driver.Progress{Attempt: 2}))
	noError(t, s.Ack(t.Context(), ds[2:], false))
	take(t, s, 1)
	// A broker with shorter steps has the one that waits come back, and the session has room to send it on.
	receiving(t, s, func() {
		wants("1 moved, 1 done, the others taken", func(b driver.Backlog) bool { return b == driver.Backlog{Retrying: 1} })
	})
	noError(t, s.GiveBack(t.Context(), ds[1:2]))
	ended(t, s) // with one unsettled
	wants("given back", func(b driver.Backlog) bool {
		left := b.Waiting + b.Retrying
		return b.Waiting >= 2 && (left == 3 || left == 4 && f.Forgetful)
	})
}

// receiving has a session receive while do runs, for it sends on what only passes through it. Nothing may come.
func receiving(t *testing.T, s driver.Session, do func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		if ds, err := s.Receive(ctx, 1); len(ds) != 0 || !errors.Is(err, context.Canceled) {
			t.Errorf("%d messages too many, error %v", len(ds), err)
		}
	}()
	defer func() {
		cancel()
		<-ended
	}()
	do()
}
