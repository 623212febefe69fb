package conformance

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
)

func needsNetwork(t *testing.T, f ConsumerFixture) {
	t.Helper()
	if f.Network == nil {
		t.Skip("there is no network to break")
	}
}

// Connections that are cut while messages are processed and retried cost deliveries, and no message.
func testConsumerCut(cfg ConsumerConfig) func(*testing.T, ConsumerFixture) {
	return func(t *testing.T, f ConsumerFixture) {
		needsNetwork(t, f)
		const n = 150
		r := &runs{do: func(_ context.Context, m *inbox.Message) error {
			time.Sleep(5 * time.Millisecond)
			if m.Attempt < 2 {
				return errBoom // so that copies are on their way, too
			}
			return nil
		}}
		cfg.Retry = inbox.RetryPolicy{MaxAttempts: 10, BaseDelay: 50 * time.Millisecond, MaxDelay: 100 * time.Millisecond}
		w := consume(t, f, r, cfg)
		for i := range n {
			publishMany(t, f, "event", 1)
			if i%50 == 25 {
				f.Network.CutConnections()
			}
		}
		awaitCount(t, "messages done", n, r.finished)
		w.awaitReady(true)
		w.stop()
		wantRest(t, f, 0)
		if letters := dead(t, f); len(letters) != 0 {
			t.Errorf("dead letters %+v", letters)
		}
	}
}

// A message whose connection is lost while it is processed is not processed again beside itself: the
// result of the run settles what comes again.
func testConsumerTwin(t *testing.T, f ConsumerFixture) {
	needsNetwork(t, f)
	release := make(chan struct{})
	r := &runs{do: func(_ context.Context, m *inbox.Message) error {
		if m.Name == "slow" {
			<-release
		}
		return nil
	}}
	w := consume(t, f, r, ConsumerConfig{ConsumerConfig: inbox.ConsumerConfig{Concurrency: 2}})
	slow := publishMany(t, f, "slow", 1)[0]
	awaitCount(t, "messages begun", 1, r.count)
	f.Network.CutConnections()
	publishMany(t, f, "event", 3)
	awaitCount(t, "messages done", 3, r.finished)
	w.awaitReady(true)
	time.Sleep(quiet)
	close(release)
	awaitCount(t, "messages done", 4, r.finished)
	time.Sleep(quiet)
	w.stop()
	if n := len(r.attempts(slow)); n != 1 {
		t.Errorf("the message in work ran %d times", n)
	}
	wantRest(t, f, 0)
}

// Bad messages whose place takes none, more than the prefetch and at the head of the queue, let the
// good ones pass. They end where they belong as soon as they can.
func testConsumerNoPlace(t *testing.T, f ConsumerFixture) {
	if f.Refuse == nil {
		t.Skip("no place can be made to refuse")
	}
	const bad, good = 40, 100
	r := &runs{do: func(_ context.Context, m *inbox.Message) error {
		if m.Name == "bad" {
			return inbox.Invalid(errBoom)
		}
		return nil
	}}
	publishMany(t, f, "bad", bad)
	publishMany(t, f, "good", good)
	var mend func()
	w := launch(t, f, r, ConsumerConfig{}, func() { mend = f.Refuse(t, driver.ClassValidation) })
	awaitCount(t, "good messages", good, r.finished)
	await(t, func() error {
		if err := w.Ready(t.Context()); err == nil || !strings.Contains(err.Error(), driver.ClassValidation) {
			return fmt.Errorf("ready: %w", err)
		}
		return nil
	})
	mend()
	for _, letter := range awaitDead(t, f, bad) {
		if letter.Attempts != 1 || letter.Class != driver.ClassValidation {
			t.Errorf("dead letter %+v", letter)
		}
	}
	w.awaitReady(true)
	w.stop()
	wantRest(t, f, 0)
}

func needsDelete(t *testing.T, f ConsumerFixture) {
	t.Helper()
	if f.Delete == nil {
		t.Skip("the queue cannot be deleted")
	}
}

func testConsumerQueueDeleted(t *testing.T, f ConsumerFixture) {
	needsDelete(t, f)
	r := &runs{}
	w := consume(t, f, r, ConsumerConfig{})
	declare := f.Delete(t)
	w.awaitReady(false)
	declare()
	publishMany(t, f, "event", 1)
	awaitCount(t, "messages done", 1, r.finished)
	w.awaitReady(true)
}

// A consumer without its queue says so, to the log and to Ready, and works once somebody makes it.
func testConsumerQueueLater(t *testing.T, f ConsumerFixture) {
	needsDelete(t, f)
	r := &runs{}
	var log logText
	cfg := ConsumerConfig{ConsumerConfig: inbox.ConsumerConfig{Logger: slog.New(slog.NewTextHandler(&log, nil))}}
	var declare func()
	w := launch(t, f, r, cfg, func() { declare = f.Delete(t) })
	await(t, func() error {
		if err := w.Ready(t.Context()); err == nil || !strings.Contains(err.Error(), "Setup") {
			return fmt.Errorf("ready: %w", err)
		}
		if !strings.Contains(log.String(), "Setup") {
			return errors.New("the log does not say it")
		}
		return nil
	})
	declare()
	publishMany(t, f, "event", 1)
	awaitCount(t, "messages done", 1, r.finished)
}

// An idle consumer notices that the network has fallen silent, and is ready again after it.
func testConsumerSilence(t *testing.T, f ConsumerFixture) {
	needsNetwork(t, f)
	if f.InMemory {
		t.Skip("there is no server that could fall silent")
	}
	r := &runs{}
	w := consume(t, f, r, ConsumerConfig{})
	f.Network.Pause()
	began := time.Now()
	w.awaitReady(false)
	if took := time.Since(began); took > time.Minute {
		t.Errorf("noticed after %v", took)
	}
	f.Network.Heal()
	w.awaitReady(true)
	publishMany(t, f, "event", 3)
	awaitCount(t, "messages done", 3, r.finished)
}

// Run ends within ShutdownTimeout, whatever does not answer.
func testConsumerEndsInSilence(t *testing.T, f ConsumerFixture) {
	needsNetwork(t, f)
	const limit = 4 * time.Second
	release := make(chan struct{})
	r := &runs{do: func(_ context.Context, m *inbox.Message) error {
		<-release
		if m.Name == "bad" {
			return errBoom
		}
		return nil
	}}
	w := consume(t, f, r, ConsumerConfig{ConsumerConfig: inbox.ConsumerConfig{ShutdownTimeout: limit}})
	bad := publishMany(t, f, "bad", 1)[0]
	publishMany(t, f, "event", 1)
	awaitCount(t, "messages begun", 2, r.count)
	f.Network.Pause()
	close(release)
	wantEnd(t, w, limit)
	f.Network.Heal()
	again := &runs{}
	consume(t, f, again, ConsumerConfig{})
	await(t, func() error { // the acknowledgement of the other one may have arrived
		if len(again.attempts(bad)) == 0 {
			return errors.New("the failed message has not come again")
		}
		return nil
	})
}

// More failed messages than the consumer has workers wait for their retries without one.
func testConsumerManyRetries(t *testing.T, f ConsumerFixture) {
	const n = 100
	r := &runs{do: func(_ context.Context, m *inbox.Message) error {
		if m.Name == "bad" && m.Attempt == 1 {
			return inbox.RetryAfter(errBoom, time.Second)
		}
		return nil
	}}
	publishMany(t, f, "bad", n)
	w := consume(t, f, r, ConsumerConfig{ConsumerConfig: inbox.ConsumerConfig{Concurrency: 2}})
	publishMany(t, f, "event", 10)
	awaitCount(t, "messages done", n+10, r.finished)
	if total := r.count(); total != 2*n+10 {
		t.Errorf("%d deliveries, want %d", total, 2*n+10)
	}
	w.stop()
	wantRest(t, f, 0)
}
