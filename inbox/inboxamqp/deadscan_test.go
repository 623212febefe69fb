package inboxamqp_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/google/uuid"
	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/inboxamqp"
	"github.com/holdfast-go/holdfast/internal/amqpconn"
	"github.com/holdfast-go/holdfast/internal/amqptest"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// What is deleted makes room for further letters, of which none is passed over.
func TestRemoveSomeOfManyLetters(t *testing.T) {
	t.Parallel()
	for name, classic := range map[string]bool{"quorum": false, "classic": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			const each = 80 // more than a scan is sent at once
			b := amqptest.New(t)
			letters := afterSetup(t, b, config{Classic: classic}).DeadLetters()
			for n := range 2 * each {
				p := order()
				p.Type = []string{"even", "odd"}[n%2]
				b.Publish(t, "", "failed.default", p)
			}
			awaitDepth(t, b, "failed.default", 2*each)
			for _, filter := range []inbox.Filter{{Name: "even"}, {}} {
				if n, err := letters.Remove(t.Context(), filter, inbox.Removal{By: "test"}); n != each || err != nil {
					t.Errorf("%+v: removed %d of %d, error %v", filter, n, each, err)
				}
			}
		})
	}
}

// hold takes so many letters as another session does, until the returned function is called.
func hold(t *testing.T, b *amqptest.Broker, n int) (release func(), held []amqp.Delivery) {
	t.Helper()
	ch := b.Channel(t)
	must(t, ch.Qos(n, 0, false))
	deliveries, err := ch.Consume("failed.default", "", false, false, false, false, nil)
	must(t, err)
	late := time.After(testenv.Patience)
	for range n {
		select {
		case d := <-deliveries:
			held = append(held, d)
		case <-late:
			t.Fatalf("%d of %d letters came", len(held), n)
		}
	}
	return func() { must(t, ch.Close()) }, held
}

// A look that cannot see what another session holds says so, and each call does what it can.
func TestPartOfTheLetters(t *testing.T) {
	t.Parallel()
	for name, classic := range map[string]bool{"quorum": false, "classic": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			const count, part = 10, 4
			b := amqptest.New(t)
			c := afterSetup(t, b, config{Classic: classic})
			letters := c.DeadLetters()
			for range count {
				b.Publish(t, "", "failed.default", deadOrder(0))
			}
			awaitDepth(t, b, "failed.default", count)
			wantsHeld := func(want bool) {
				t.Helper()
				testenv.Eventually(t, func() error { // a queue tells late how many it has
					stats, err := c.Stats(t.Context())
					if stats.Held != want || err != nil {
						return fmt.Errorf("stats are %+v, error %w; want held: %v", stats, err, want)
					}
					return nil
				})
			}
			wantsHeld(false)
			release, held := hold(t, b, part)
			wantsHeld(true)
			wants := func(what string, got int, err error, want int, isPart bool) {
				t.Helper()
				if got != want || errors.Is(err, inbox.ErrHeld) != isPart || !isPart && err != nil {
					t.Errorf("%s: %d, error %v; want %d, a part: %v", what, got, err, want, isPart)
				}
			}
			found, err := letters.List(t.Context(), inbox.Filter{})
			wants("list", len(found), err, count-part, true)
			some, err := letters.List(t.Context(), inbox.Filter{Limit: 2})
			wants("list of 2", len(some), err, 2, false)
			n, err := letters.Count(t.Context(), inbox.Filter{})
			wants("count", n, err, count-part, true)
			groups, err := letters.Groups(t.Context(), inbox.Filter{})
			if len(groups) != 1 {
				t.Fatalf("%d groups, error %v", len(groups), err)
			}
			wants("groups", groups[0].Count, err, count-part, true)
			if _, err := letters.Show(t.Context(), uuid.MustParse(held[0].MessageId)); !errors.Is(err, inbox.ErrHeld) {
				t.Errorf("show of one that is held: %v", err)
			}
			if _, err := letters.Show(t.Context(), found[0].Message.ID); err != nil {
				t.Errorf("show of one that is seen: %v", err)
			}
			n, err = letters.Remove(t.Context(), inbox.Filter{Limit: 1}, inbox.Removal{By: "test"})
			wants("remove 1", n, err, 1, false)
			r, err := letters.Replay(t.Context(), inbox.Filter{}, inbox.Replay{By: "test"})
			wants("replay", r.Returned, err, count-part-1, true)
			n, err = letters.Count(t.Context(), inbox.Filter{})
			wants("count of what is all held", n, err, 0, true)
			release()
			wantsHeld(false)
			n, err = letters.Remove(t.Context(), inbox.Filter{}, inbox.Removal{By: "test"})
			wants("remove what came back", n, err, part, false)
			n, err = letters.Count(t.Context(), inbox.Filter{})
			wants("count of none", n, err, 0, false)
		})
	}
}

// A scan that others take letters from while it goes on has seen a part, too.
func TestLettersTakenMeanwhile(t *testing.T) {
	t.Parallel()
	const count = 120 // more than a scan is sent at once
	b := amqptest.New(t)
	c := afterSetup(t, b, config{})
	for range count {
		b.Publish(t, "", "failed.default", deadOrder(0))
	}
	awaitDepth(t, b, "failed.default", count)
	seen := 0
	err := inboxamqp.LettersOf(c).Scan(t.Context(), driver.ClassDefault, func(*inbox.DeadLetter) (driver.Fate, error) {
		if seen++; seen == 1 {
			hold(t, b, 30)
		}
		return driver.Keep, nil
	}, func(inbox.DeadLetter, error) {})
	if seen != count-30 || !errors.Is(err, inbox.ErrHeld) {
		t.Errorf("%d of %d letters, error %v", seen, count, err)
	}
}

// Who looks right after a scan that was cut off sees all.
func TestLookAfterScanCutOff(t *testing.T) {
	t.Parallel()
	for name, classic := range map[string]bool{"quorum": false, "classic": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			const count = 40
			b := amqptest.New(t)
			proxy := testenv.NewProxy(t, b.URL)
			direct := afterSetup(t, b, config{Classic: classic})
			cut := newConsumer(t, hasty(proxy.URL()), &recorder{}, config{Classic: classic})
			for range count {
				b.Publish(t, "", "failed.default", deadOrder(0))
			}
			awaitDepth(t, b, "failed.default", count)
			conn, err := amqpconn.Open(t.Context(), b.Dial, patience) // beforehand: the look is at once
			must(t, err)
			defer conn.Close()
			for range 10 {
				for what, end := range map[string]func(cancel context.CancelFunc){
					"context": func(cancel context.CancelFunc) { cancel() },
					"network": func(context.CancelFunc) { proxy.CutConnections() },
				} {
					ctx, cancel := context.WithCancel(t.Context())
					seen := 0
					var ended time.Time
					err := inboxamqp.LettersOf(cut).Scan(ctx, driver.ClassDefault, func(*inbox.DeadLetter) (driver.Fate, error) {
						if seen++; seen == 3 {
							ended = time.Now()
							end(cancel)
						}
						return driver.Keep, nil
					}, func(inbox.DeadLetter, error) {})
					cancel()
					if what == "context" {
						if !errors.Is(err, context.Canceled) {
							t.Errorf("the scan ended with %v", err)
						}
						// A scan that gave up has waited for a second.
						q, err := conn.Count("failed.default")
						if time.Since(ended) < time.Second && (q.Messages != count || err != nil) {
							t.Errorf("%d of %d letters given back, error %v", q.Messages, count, err)
						}
						awaitDepth(t, b, "failed.default", count)
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
			}
		})
	}
}

// A scan of a part that was cut off at its end says so: it does not know that its letters went back.
func TestScanOfPartCutOff(t *testing.T) {
	t.Parallel()
	const count, part = 3, 1
	b := amqptest.New(t)
	proxy := testenv.NewProxy(t, b.URL)
	afterSetup(t, b, config{})
	cut := newConsumer(t, hasty(proxy.URL()), &recorder{}, config{})
	for range count {
		b.Publish(t, "", "failed.default", deadOrder(0))
	}
	awaitDepth(t, b, "failed.default", count)
	hold(t, b, part)
	seen := 0
	err := inboxamqp.LettersOf(cut).Scan(t.Context(), driver.ClassDefault, func(*inbox.DeadLetter) (driver.Fate, error) {
		if seen++; seen == count-part {
			proxy.CutConnections()
		}
		return driver.Keep, nil
	}, func(inbox.DeadLetter, error) {})
	if seen != count-part || err == nil || errors.Is(err, inbox.ErrHeld) {
		t.Errorf("%d letters, error %v", seen, err)
	}
}

// A deadline that passes while a scan connects is its error.
func TestScanConnectsUntilItsDeadline(t *testing.T) {
	t.Parallel()
	dial := func(ctx context.Context) (*amqp.Connection, error) {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	err := inboxamqp.LettersOf(newConsumer(t, dial, &recorder{}, config{})).Scan(ctx, driver.ClassDefault, nil, nil)
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("error %v", err)
	}
}

// A scan is a consumer from the first letter to the last, by which others know that it has letters in hand.
func TestScanIsSeenByOthers(t *testing.T) {
	t.Parallel()
	const count = 1000 // many more than a scan is sent at once
	b := amqptest.New(t)
	c := afterSetup(t, b, config{Classic: true})
	publishAll(t, b, "failed.default", "order.placed", count)
	awaitDepth(t, b, "failed.default", count)
	ch := b.Channel(t)
	watched := make(chan error, 1)
	begun, over := make(chan struct{}), make(chan struct{})
	go func() {
		<-begun
		for {
			q, err := ch.QueueDeclarePassive("failed.default", true, false, false, false, nil)
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
	err := inboxamqp.LettersOf(c).Scan(t.Context(), driver.ClassDefault, func(*inbox.DeadLetter) (driver.Fate, error) {
		switch seen++; seen {
		case 1:
			close(begun)
		case count:
			close(over)
		}
		return driver.Keep, nil
	}, func(inbox.DeadLetter, error) {})
	if seen != count || err != nil {
		t.Fatalf("%d of %d letters, error %v", seen, count, err)
	}
	if err := <-watched; err != nil {
		t.Error(err)
	}
}
