package inboxamqp_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/internal/amqptest"
	"github.com/holdfast-go/holdfast/internal/ids"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// withDeadLetters returns a broker with the queue "orders" and one for dead letters.
func withDeadLetters(t *testing.T) *amqptest.Broker {
	t.Helper()
	b := amqptest.New(t)
	b.Queue(t, "orders", nil)
	b.Queue(t, "failed.default", nil)
	return b
}

// newDeadLetters is an operator's access: of a consumer that never runs.
func newDeadLetters(t *testing.T, b *amqptest.Broker, cfg config) inbox.DeadLetters {
	t.Helper()
	return newConsumer(t, b.Dial, inbox.NewMux(), cfg).DeadLetters()
}

func TestDeadLetters(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	var broken atomic.Bool
	broken.Store(true)
	got := recorder{fail: failWhile(&broken, inbox.Unrecoverable(errBroken))}
	r := consume(t, b, &got, config{Queue: "orders", Retry: quick, DeadLetterPrefix: "shop.", Name: "billing"})
	sent := []amqp.Publishing{order(), order(), order(), order()}
	sent[1].Type = "order.cancelled"
	sent[3].MessageId = "none"
	for _, p := range sent {
		p.Headers = amqp.Table{"tenant": "a"}
		b.Publish(t, "", "orders", p)
	}
	awaitDepth(t, b, "shop.failed.unrecoverable", 3)
	awaitDepth(t, b, "shop.failed.validation", 1)

	letters := newDeadLetters(t, b, config{DeadLetterPrefix: "shop.", Classes: []string{"missing"}})
	list := func(f inbox.Filter) []inbox.DeadLetter {
		found, err := letters.List(t.Context(), f)
		if err != nil {
			t.Fatal(err)
		}
		return found
	}
	if n := len(list(inbox.Filter{})); n != 4 {
		t.Errorf("%d dead letters", n)
	}
	if n := len(list(inbox.Filter{Limit: 2})); n != 2 {
		t.Errorf("%d dead letters with a limit of 2", n)
	}
	if n := len(list(inbox.Filter{FailedAfter: time.Now().Add(time.Hour)})); n != 0 {
		t.Errorf("%d dead letters of the future", n)
	}
	if n, err := letters.Count(t.Context(), inbox.Filter{Class: driver.ClassUnrecoverable}); n != 3 || err != nil {
		t.Errorf("%d dead letters counted, error %v", n, err)
	}
	id := ids.New()
	if _, err := letters.Show(t.Context(), id); !errors.Is(err, inbox.ErrNotFound) {
		t.Errorf("show: %v", err)
	}
	cancelled := list(inbox.Filter{Name: "order.cancelled", Class: driver.ClassUnrecoverable})
	if len(cancelled) != 1 {
		t.Fatalf("%d dead letters of the name", len(cancelled))
	}
	dead, err := letters.Show(t.Context(), cancelled[0].Message.ID)
	if err != nil || dead.Error != "broken" || dead.Attempts != 1 || dead.Consumer != "billing" || dead.Message.Queue != "orders" ||
		string(dead.Message.Body) != `{"n":1}` || dead.Message.Headers["tenant"] != "a" || dead.FailedAt.IsZero() {
		t.Errorf("dead letter %+v, error %v", dead, err)
	}

	if n, err := letters.Remove(t.Context(), inbox.Filter{Class: driver.ClassValidation}, inbox.Removal{By: "test"}); n != 1 || err != nil {
		t.Errorf("removed %d, error %v", n, err)
	}
	broken.Store(false)
	before := len(got.messages())
	if n, err := letters.Replay(t.Context(), inbox.Filter{Name: "order.placed"}, inbox.Replay{By: "test"}); n.Returned != 2 || err != nil {
		t.Errorf("retried %+v, error %v", n, err)
	}
	for _, m := range got.await(t, before+2)[before:] {
		if m.Attempt != 1 || !m.FirstFailedAt.IsZero() || m.Headers["tenant"] != "a" {
			t.Errorf("replayed message %+v", m)
		}
	}
	awaitDepth(t, b, "shop.failed.unrecoverable", 1)
	awaitDepth(t, b, "shop.failed.validation", 0)
	r.stop(t)
	awaitDepth(t, b, "orders", 0)
}

// A connection lost in the middle of a replay costs duplicates, and no message.
func TestReplayCut(t *testing.T) {
	t.Parallel()
	b := withDeadLetters(t)
	const n = 100
	missing := map[string]bool{}
	for range n {
		p := order()
		p.Headers = amqp.Table{"holdfast-origin-queue": "orders"}
		b.Publish(t, "", "failed.default", p)
		missing[p.MessageId] = true
	}
	proxy := testenv.NewProxy(t, b.URL)
	dial := func(context.Context) (*amqp.Connection, error) { return amqp.Dial(proxy.URL()) }
	letters := newConsumer(t, dial, inbox.NewMux(), config{}).DeadLetters()
	first := make(chan int)
	go func() {
		k, _ := letters.Replay(t.Context(), inbox.Filter{}, inbox.Replay{By: "test"})
		first <- k.Returned
	}()
	testenv.Eventually(t, func() error {
		if b.Depth(t, "orders") == 0 {
			return errors.New("not begun")
		}
		return nil
	})
	proxy.CutConnections()
	returned := <-first
	testenv.Eventually(t, func() error {
		k, err := letters.Replay(t.Context(), inbox.Filter{}, inbox.Replay{By: "test"})
		returned += k.Returned
		return errors.Join(err, depthIs(t, b, "failed.default", 0))
	})
	if returned < n {
		t.Errorf("%d counted", returned)
	}
	for _, d := range b.Take(t, "orders", b.Depth(t, "orders"), patience) {
		delete(missing, d.MessageId)
	}
	if len(missing) != 0 {
		t.Errorf("%d messages lost", len(missing))
	}
}

// What cannot be returned to its queue stays a dead letter.
func TestReplayWithoutOrigin(t *testing.T) {
	t.Parallel()
	b := withDeadLetters(t)
	for _, origin := range []any{nil, "gone", "orders"} {
		p := order()
		p.Headers = amqp.Table{"holdfast-origin-queue": origin, "holdfast-replays": int32(2), "holdfast-attempt": "9"}
		b.Publish(t, "", "failed.default", p)
	}
	letters := newDeadLetters(t, b, config{})
	if n, err := letters.Replay(t.Context(), inbox.Filter{}, inbox.Replay{By: "test"}); n != (inbox.Replayed{Returned: 1, Failed: 2}) || err == nil {
		t.Errorf("retried %+v, error %v", n, err)
	}
	awaitDepth(t, b, "failed.default", 2)
	d := b.Take(t, "orders", 1, patience)[0]
	if d.Headers["holdfast-replays"] != "3" || d.Headers["holdfast-attempt"] != nil {
		t.Errorf("headers %v", d.Headers)
	}
}

// deadOrder is a dead letter of the queue orders whose id is that old.
func deadOrder(age time.Duration) amqp.Publishing {
	p := order()
	p.MessageId = ids.Deterministic(time.Now().Add(-age), p.MessageId).String()
	p.Headers = amqp.Table{"holdfast-origin-queue": "orders", "holdfast-failure-class": "default"}
	return p
}

// A replay is counted before, refuses what nobody remembers, and is no faster than told.
func TestReplayGuards(t *testing.T) {
	t.Parallel()
	b := withDeadLetters(t)
	for _, age := range []time.Duration{0, 7 * 24 * time.Hour, 9 * 24 * time.Hour, time.Hour, time.Minute} {
		b.Publish(t, "", "failed.default", deadOrder(age))
	}
	letters := newDeadLetters(t, b, config{})
	short := newDeadLetters(t, b, config{Retention: 24 * time.Hour})
	retry := func(letters inbox.DeadLetters, how inbox.Replay, want inbox.Replayed, refused bool) {
		t.Helper()
		if got, err := letters.Replay(t.Context(), inbox.Filter{}, how); got != want || errors.Is(err, inbox.ErrOutlived) != refused {
			t.Errorf("%+v: %+v, error %v; want %+v", how, got, err, want)
		}
	}
	retry(letters, inbox.Replay{DryRun: true}, inbox.Replayed{Returned: 4, Outlived: 1}, true)
	retry(short, inbox.Replay{DryRun: true}, inbox.Replayed{Returned: 3, Outlived: 2}, true)
	awaitDepth(t, b, "failed.default", 5)
	if _, err := letters.Replay(t.Context(), inbox.Filter{}, inbox.Replay{By: "test", PerSecond: -1}); err == nil {
		t.Error("a negative rate was accepted")
	}
	begun := time.Now()
	retry(letters, inbox.Replay{By: "test", PerSecond: 20}, inbox.Replayed{Returned: 4, Outlived: 1}, true)
	if took := time.Since(begun); took < 150*time.Millisecond {
		t.Errorf("4 messages at 20 per second took %v", took)
	}
	retry(letters, inbox.Replay{By: "test", Force: true}, inbox.Replayed{Returned: 1}, false)
	awaitDepth(t, b, "failed.default", 0)
	awaitDepth(t, b, "orders", 5)
}

// What fails again meanwhile is not returned again, and an interrupted replay can go on.
func TestReplayIsBoundedAndResumes(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	got := recorder{fail: func(*inbox.Message) error {
		time.AfterFunc(time.Second, cancel) // the first one has come back, and the next is far
		return inbox.Invalid(errBroken)
	}}
	consume(t, b, &got, config{Queue: "orders", Retry: quick})
	const n = 10
	for range n {
		b.Publish(t, "", "failed.default", deadOrder(0))
	}
	letters := newDeadLetters(t, b, config{})
	first := time.Now()
	some, err := letters.Replay(ctx, inbox.Filter{}, inbox.Replay{By: "test", PerSecond: 0.1})
	if !errors.Is(err, context.Canceled) || some.Returned == 0 || some.Returned == n {
		t.Fatalf("interrupted: %+v, error %v", some, err)
	}
	testenv.Eventually(t, func() error { return depthIs(t, b, "failed.default", n-some.Returned) })
	testenv.Eventually(t, func() error { return depthIs(t, b, "failed.validation", some.Returned) })
	rest, err := letters.Replay(t.Context(), inbox.Filter{FailedBefore: first}, inbox.Replay{By: "test"})
	if err != nil || some.Returned+rest.Returned != n {
		t.Errorf("resumed: %+v after %+v, error %v", rest, some, err)
	}
	testenv.Eventually(t, func() error { return depthIs(t, b, "failed.validation", n) })
	if len(got.messages()) != n {
		t.Errorf("%d deliveries", len(got.messages()))
	}
}

// What one look has returned the next one finds.
func TestListedTwiceInARow(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	letters := afterSetup(t, b, config{}).DeadLetters() // quorum queues without a limit on deliveries
	const count = 2
	for range count {
		b.Publish(t, "", "failed.default", order())
	}
	awaitDepth(t, b, "failed.default", count)
	for range 100 {
		if found, err := letters.List(t.Context(), inbox.Filter{}); len(found) != count || err != nil {
			t.Fatalf("%d of %d dead letters, error %v", len(found), count, err)
		}
	}
}
