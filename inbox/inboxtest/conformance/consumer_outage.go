package conformance

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
)

var errDown = inbox.Unavailable(errBoom)

// Messages that always fail for want of a server stop no others, and are given up in the end.
func testConsumerPoison(cfg ConsumerConfig) func(*testing.T, ConsumerFixture) {
	return func(t *testing.T, f ConsumerFixture) {
		r := badIsDown()
		var good int
		for i := range 30 {
			if i == 0 || i == 1 || i == 20 { // two side by side, at the head
				publishMany(t, f, "bad", 1)
			}
			publishMany(t, f, "good", 1)
			good++
		}
		cfg.Retry = inbox.RetryPolicy{MaxAttempts: 2, BaseDelay: 100 * time.Millisecond}
		w := consume(t, f, r, cfg)
		awaitCount(t, "good messages", good, r.finished) // they need not wait until the bad ones are dead
		good += feedUntilDead(t, f, 3)
		awaitCount(t, "good messages", good, r.finished)
		for _, letter := range awaitDead(t, f, 3) {
			if letter.Message.Name != "bad" || letter.Class != driver.ClassDefault || letter.Attempts != 2 {
				t.Errorf("dead letter %s: %s after %d attempts", letter.Message.Name, letter.Class, letter.Attempts)
			}
		}
		r.wantFirst(t, isGood)
		w.stop()
		wantRest(t, f, 0)
	}
}

// badIsDown fails messages named bad as if for want of a server.
func badIsDown() *runs {
	return &runs{do: func(_ context.Context, m *inbox.Message) error {
		if m.Name == "bad" {
			return errDown
		}
		return nil
	}}
}

// feedUntilDead publishes good messages, which show that the server is there, until there are so many
// dead letters. It returns how many it has published.
func feedUntilDead(t *testing.T, f ConsumerFixture, want int) (good int) {
	t.Helper()
	await(t, func() error {
		publishMany(t, f, "good", 1)
		good++
		if n := len(dead(t, f)); n < want {
			return fmt.Errorf("%d of %d dead letters", n, want)
		}
		return nil
	})
	return good
}

// More of them than the consumer has in hand, at the head of a queue to which they return, let the
// good ones pass.
func testConsumerManyPoisons(t *testing.T, f ConsumerFixture) {
	const bad, good = 60, 200
	r := badIsDown()
	publishMany(t, f, "bad", bad)
	publishMany(t, f, "good", good)
	consume(t, f, r, ConsumerConfig{ConsumerConfig: inbox.ConsumerConfig{Retry: inbox.RetryPolicy{MaxAttempts: 2, BaseDelay: 100 * time.Millisecond}}})
	awaitCount(t, "good messages", good, r.finished)
	feedUntilDead(t, f, bad)
	r.wantFirst(t, isGood)
	awaitDead(t, f, bad)
}

// A real outage costs no message an attempt, however often it comes, and nothing spins.
func testConsumerOutage(t *testing.T, f ConsumerFixture) {
	var down atomic.Bool
	r := &runs{do: func(context.Context, *inbox.Message) error {
		if down.Load() {
			return errDown
		}
		return nil
	}}
	w := consume(t, f, r, ConsumerConfig{ConsumerConfig: inbox.ConsumerConfig{Concurrency: 4}})
	const n, outages = 30, 3
	for k := range outages {
		down.Store(true)
		before := r.count()
		publishMany(t, f, "event", n)
		w.awaitReady(false)
		probes := r.count() + 3
		awaitCount(t, "probes", probes, r.count)
		if tried := r.count() - before; tried > 2*n {
			t.Errorf("%d deliveries in an outage: a hot loop", tried)
		}
		down.Store(false)
		awaitCount(t, "messages done", (k+1)*n, r.finished) // what is left would fail in the next outage too
		w.awaitReady(true)
	}
	r.wantFirst(t, anyMessage)
	w.stop()
	wantRest(t, f, 0)
	if letters := dead(t, f); len(letters) != 0 {
		t.Errorf("dead letters %+v", letters)
	}
}

// While the server is down, what fails by itself shows nothing about it.
func testConsumerOutageInvalid(t *testing.T, f ConsumerFixture) {
	var down atomic.Bool
	down.Store(true)
	r := &runs{do: func(_ context.Context, m *inbox.Message) error {
		switch {
		case m.Name == "bad":
			return inbox.Invalid(errBoom)
		case down.Load():
			return errDown
		}
		return nil
	}}
	for range 6 {
		publishMany(t, f, "event", 1)
		publishMany(t, f, "bad", 1)
	}
	w := launch(t, f, r, ConsumerConfig{ConsumerConfig: inbox.ConsumerConfig{Concurrency: 1}})
	awaitDead(t, f, 6)
	down.Store(false)
	awaitCount(t, "messages done", 6, r.finished)
	w.awaitReady(true)
	r.wantFirst(t, anyMessage)
	awaitDead(t, f, 6)
}

// A message that runs on while its consumer pauses is settled afterwards.
func testConsumerPauseWhileRunning(t *testing.T, f ConsumerFixture) {
	var down atomic.Bool
	down.Store(true)
	release := make(chan struct{})
	var slow atomic.Int64
	r := &runs{do: func(_ context.Context, m *inbox.Message) error {
		switch {
		case m.Name == "slow":
			slow.Add(1)
			<-release
		case down.Load():
			return errDown
		}
		return nil
	}}
	w := consume(t, f, r, ConsumerConfig{ConsumerConfig: inbox.ConsumerConfig{Concurrency: 2}})
	publishMany(t, f, "slow", 1)
	awaitCount(t, "slow messages begun", 1, func() int { return int(slow.Load()) })
	publishMany(t, f, "event", 10)
	w.awaitReady(false)
	down.Store(false)
	awaitCount(t, "messages done", 10, r.finished)
	close(release)
	w.stop()
	wantRest(t, f, 0)
	if n := slow.Load(); n != 1 {
		t.Errorf("the message in work was delivered %d times: its session was lost", n)
	}
}

// A handler's limit keeps its messages from taking all workers.
func testConsumerHandlerLimit(t *testing.T, f ConsumerFixture) {
	release := make(chan struct{})
	var slow, most atomic.Int64
	r := &runs{do: func(_ context.Context, m *inbox.Message) error {
		if m.Name == "slow" {
			most.Store(max(most.Load(), slow.Add(1)))
			<-release
			slow.Add(-1)
		}
		return nil
	}}
	w := consume(t, f, limited{r}, ConsumerConfig{ConsumerConfig: inbox.ConsumerConfig{Concurrency: 4, Prefetch: 20}})
	publishMany(t, f, "slow", 30)
	publishMany(t, f, "event", 10)
	awaitCount(t, "other messages", 10, r.finished)
	close(release)
	awaitCount(t, "messages", 40, r.finished)
	if n := most.Load(); n != 2 {
		t.Errorf("%d slow messages at once, want 2", n)
	}
	r.wantFirst(t, anyMessage)
	w.stop()
	wantRest(t, f, 0)
}

// limited is a processor two of whose slow messages may be processed at once.
type limited struct{ *runs }

func (limited) Limit(name string) int {
	if name == "slow" {
		return 2
	}
	return 0
}
