package inboxamqp_test

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/inboxamqp"
	"github.com/holdfast-go/holdfast/internal/amqpconn"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/amqptest"
)

// shelf returns a broker with n dead letters of the class default.
func shelf(t *testing.T, cfg config, n int) (*amqptest.Broker, *inboxamqp.Consumer) {
	t.Helper()
	b := amqptest.New(t)
	c := afterSetup(t, b, cfg)
	publishAll(t, b, "orders.failed.default", "order.placed", n)
	awaitDepth(t, b, "orders.failed.default", n)
	return b, c
}

func neverFails(inbox.DeadLetter, error) {}

// Removing messages lets the broker send further ones, and none is skipped.
func TestRemoveSomeOfManyLetters(t *testing.T) {
	t.Parallel()
	const each = 80 // more than one window of a scan
	b, c := shelf(t, config{}, each)
	publishAll(t, b, "orders.failed.default", "odd", each)
	awaitDepth(t, b, "orders.failed.default", 2*each)
	for _, filter := range []inbox.Filter{{Name: "odd"}, {}} {
		if n, err := c.DeadLetters().Remove(t.Context(), filter, inbox.Removal{By: "test"}); n != each || err != nil {
			t.Errorf("%+v: removed %d of %d, error %v", filter, n, each, err)
		}
	}
}

// hold receives n messages in another session, until the returned function is called.
func hold(t *testing.T, b *amqptest.Broker, n int) (release func()) {
	t.Helper()
	ch := b.Channel(t)
	must(t, ch.Qos(n, 0, false))
	deliveries, err := ch.Consume("orders.failed.default", "", false, false, false, false, nil)
	must(t, err)
	late := time.After(testenv.Patience)
	for range n {
		select {
		case <-deliveries:
		case <-late:
			t.Fatal("too few letters came")
		}
	}
	return func() { must(t, ch.Close()) }
}

// A scan reports that another session holds messages. The calls of driver.NewDeadLetters depend on that.
func TestScan_reportsHeldMessages(t *testing.T) {
	t.Parallel()
	const count, part = 10, 4
	b, c := shelf(t, config{}, count)
	letters := c.DeadLetters()
	wantsHeld := func(want bool) {
		t.Helper()
		testenv.Eventually(t, func() error { // the queue counts them late
			stats, err := c.Stats(t.Context())
			if stats.Held != want || err != nil {
				return fmt.Errorf("stats are %+v, error %w; want held: %v", stats, err, want)
			}
			return nil
		})
	}
	wantsHeld(false)
	release := hold(t, b, part)
	wantsHeld(true)
	if some, err := letters.List(t.Context(), inbox.Filter{Limit: 2}); len(some) != 2 || err != nil {
		t.Errorf("%d letters of 2 listed, error %v", len(some), err)
	}
	if n, err := letters.Remove(t.Context(), inbox.Filter{}, inbox.Removal{By: "test"}); n != count-part || !errors.Is(err, inbox.ErrHeld) {
		t.Errorf("removed %d of %d, error %v", n, count-part, err)
	}
	if n, err := letters.Count(t.Context(), inbox.Filter{}); n != 0 || !errors.Is(err, inbox.ErrHeld) {
		t.Errorf("%d letters counted where all are held, error %v", n, err)
	}
	release()
	wantsHeld(false)
	if n, err := letters.Count(t.Context(), inbox.Filter{}); n != part || err != nil {
		t.Errorf("%d of %d letters came back, error %v", n, part, err)
	}
}

// A scan is also partial if another consumer takes messages during the scan.
func TestScan_reportsMessagesTakenMeanwhile(t *testing.T) {
	t.Parallel()
	const count = 120 // more than one window of a scan
	b, c := shelf(t, config{}, count)
	seen := 0
	err := inboxamqp.LettersOf(c).Scan(t.Context(), driver.ClassDefault, func(*inbox.DeadLetter) (driver.Outcome, error) {
		if seen++; seen == 1 {
			hold(t, b, 30)
		}
		return driver.Keep, nil
	}, neverFails)
	if seen != count-30 || !errors.Is(err, inbox.ErrHeld) {
		t.Errorf("%d of %d letters, error %v", seen, count, err)
	}
}

// A scan right after an interrupted one must see all messages.
func TestScan_seesAllAfterInterruptedScan(t *testing.T) {
	t.Parallel()
	for name, cfg := range map[string]config{"quorum": {}, "classic": {Classic: true}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			const count = 40
			b, direct := shelf(t, cfg, count)
			proxy := testenv.NewProxy(t, b.URL)
			cut := newConsumer(t, hasty(proxy.URL()), &recorder{}, cfg)
			for _, what := range []string{"context", "network", "context", "network"} {
				ctx, cancel := context.WithCancel(t.Context())
				seen := 0
				err := inboxamqp.LettersOf(cut).Scan(ctx, driver.ClassDefault, func(*inbox.DeadLetter) (driver.Outcome, error) {
					if seen++; seen == 3 && what == "context" {
						cancel()
					} else if seen == 3 {
						proxy.CutConnections()
					}
					return driver.Keep, nil
				}, neverFails)
				cancel()
				if what == "context" && !errors.Is(err, context.Canceled) {
					t.Errorf("the scan ended with %v", err)
				}
				testenv.Eventually(t, func() error {
					n, err := direct.DeadLetters().Count(t.Context(), inbox.Filter{})
					if errors.Is(err, inbox.ErrHeld) { // the broker has not noticed the end yet
						return err
					}
					if n != count || err != nil {
						t.Errorf("after the end of the %s: %d of %d letters, error %v", what, n, count, err)
					}
					return nil
				})
			}
		})
	}
}

// An interrupted partial scan returns an error, because it cannot check that its messages were requeued.
func TestScan_reportsInterruptionOfPartialScan(t *testing.T) {
	t.Parallel()
	const count, part = 3, 1
	b, _ := shelf(t, config{}, count)
	proxy := testenv.NewProxy(t, b.URL)
	cut := newConsumer(t, hasty(proxy.URL()), &recorder{}, config{})
	hold(t, b, part)
	seen := 0
	err := inboxamqp.LettersOf(cut).Scan(t.Context(), driver.ClassDefault, func(*inbox.DeadLetter) (driver.Outcome, error) {
		if seen++; seen == count-part {
			proxy.CutConnections()
		}
		return driver.Keep, nil
	}, neverFails)
	if seen != count-part || err == nil || errors.Is(err, inbox.ErrHeld) {
		t.Errorf("%d letters, error %v", seen, err)
	}
}

// If the deadline passes while a scan connects, the scan returns the deadline's error.
func TestScanConnectsUntilItsDeadline(t *testing.T) {
	t.Parallel()
	dial := func(ctx context.Context) (*amqp.Connection, error) {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond) // timing: it must pass
	defer cancel()
	err := inboxamqp.LettersOf(newConsumer(t, dial, &recorder{}, config{})).Scan(ctx, driver.ClassDefault, nil, nil)
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("error %v", err)
	}
}

// A scan has a consumer from the first message to the last, so that others see that messages are in flight.
func TestScan_keepsConsumer(t *testing.T) {
	t.Parallel()
	const count = 1000 // many more than one window of a scan
	b, c := shelf(t, config{Classic: true}, count)
	ch := b.Channel(t)
	watched := make(chan error, 1)
	begun, over := make(chan struct{}), make(chan struct{})
	go func() {
		<-begun
		for {
			q, err := ch.QueueDeclarePassive("orders.failed.default", true, false, false, false, nil)
			select {
			case <-over:
				watched <- nil
				return
			default:
			}
			if err != nil || q.Consumers == 0 {
				watched <- fmt.Errorf("%d consumers, error %v", q.Consumers, err)
				return
			}
		}
	}()
	seen := 0
	err := inboxamqp.LettersOf(c).Scan(t.Context(), driver.ClassDefault, func(*inbox.DeadLetter) (driver.Outcome, error) {
		switch seen++; seen {
		case 1:
			close(begun)
		case count:
			close(over)
		}
		return driver.Keep, nil
	}, neverFails)
	if seen != count || err != nil {
		t.Fatalf("%d of %d letters, error %v", seen, count, err)
	}
	if err := <-watched; err != nil {
		t.Error(err)
	}
}

// newDeadLetters returns an operator's access, through a consumer that never runs.
func newDeadLetters(t *testing.T, b *amqptest.Broker, cfg config) inbox.DeadLetters {
	t.Helper()
	return newConsumer(t, b.Dial, inbox.NewMux(), cfg).DeadLetters()
}

// A message that cannot return to its queue stays a dead letter.
func TestReplayWithoutOrigin(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	b.Queue(t, "orders", nil)
	b.Queue(t, "orders.failed.default", nil)
	for _, origin := range []any{nil, "gone", "orders"} {
		p := order()
		p.Headers = amqp.Table{"holdfast-origin-queue": origin, "holdfast-replays": int32(2), "holdfast-attempt": "9"}
		b.Publish(t, "", "orders.failed.default", p)
	}
	letters := newDeadLetters(t, b, config{})
	if n, err := letters.Replay(t.Context(), inbox.Filter{}, inbox.Replay{By: "test"}); n != (inbox.Replayed{Returned: 1, Failed: 2}) || err == nil {
		t.Errorf("retried %+v, error %v", n, err)
	}
	awaitDepth(t, b, "orders.failed.default", 2)
	d := b.Take(t, "orders", 1, testenv.Patience)[0]
	if d.Headers["holdfast-replays"] != "3" || d.Headers["holdfast-attempt"] != nil {
		t.Errorf("headers %v", d.Headers)
	}
}

// A scan must find all messages that the previous scan returned.
func TestScan_seesMessagesOfPreviousScan(t *testing.T) {
	t.Parallel()
	const count = 2
	_, c := shelf(t, config{}, count) // quorum queues without a limit on deliveries
	for range 25 {
		if found, err := c.DeadLetters().List(t.Context(), inbox.Filter{}); len(found) != count || err != nil {
			t.Fatalf("%d of %d dead letters, error %v", len(found), count, err)
		}
	}
}

// A call whose caller leaves still awaits the confirm of the copy that it has sent. Otherwise the copy and the original
// would be there.
func TestReplay_callerLeavesBeforeConfirm(t *testing.T) {
	t.Parallel()
	const n, publishing = 2, 3 // the connection that publishes is the third one
	for from, letters := range map[string]func(*inboxamqp.Consumer) inbox.DeadLetters{
		"orders.failed.default": (*inboxamqp.Consumer).DeadLetters,
		"holdfast.delay.960000": (*inboxamqp.Consumer).Retrying,
	} {
		t.Run(from, func(t *testing.T) {
			t.Parallel()
			b := amqptest.New(t)
			proxy := testenv.NewProxy(t, b.URL)
			slow := amqpconn.DialURL(proxy.URL(), amqp.Config{})
			var dials atomic.Int32
			c := newConsumer(t, func(ctx context.Context) (*amqp.Connection, error) {
				if dials.Add(1) == publishing {
					return slow(ctx)
				}
				return b.Dial(ctx)
			}, &recorder{}, config{})
			setUp(t, newConsumer(t, b.Dial, &recorder{}, config{}))
			for range n {
				p := order()
				p.Headers = amqp.Table{"holdfast-origin-queue": "orders", "holdfast-delay": "960000"}
				b.Publish(t, "", "orders.retrying", amqp.Publishing{})
				if from == "holdfast.delay.960000" {
					b.Publish(t, "holdfast.delay", "orders", p)
				} else {
					b.Publish(t, "", from, p)
				}
			}
			awaitDepth(t, b, "orders.retrying", n)
			awaitDepth(t, b, from, n)
			ctx, leave := context.WithCancel(t.Context())
			defer leave()
			visited := 0
			done, err := letters(c).Replay(ctx, inbox.Filter{}, inbox.Replay{By: "ada", Force: true, Progress: func(inbox.Replayed) {
				if visited++; visited == n { // the connection is open
					proxy.Delay(400 * time.Millisecond) // timing: longer than the publisher takes to notice that its caller has left
					time.AfterFunc(50*time.Millisecond, leave)
				}
			}})
			if done.Returned != n {
				t.Errorf("%+v, error %v, want %d returned", done, err, n)
			}
			awaitDepth(t, b, "orders", n)
			awaitDepth(t, b, from, 0)
		})
	}
}
