package inboxtest_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/inboxtest"
	"github.com/holdfast-go/holdfast/inbox/internal/memory"
	"github.com/holdfast-go/holdfast/internal/ids"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// book takes effects once, as a processor that remembers does, and checks the order of each key's.
type book struct {
	t      *testing.T
	mode   mode
	number map[uuid.UUID]int // within its key

	mu    sync.Mutex
	next  map[string]int
	taken map[uuid.UUID]bool
	runs  int
}

func (b *book) Process(ctx context.Context, msgs []*inbox.Message) []error {
	results := make([]error, len(msgs))
	for i, m := range msgs {
		results[i] = b.one(ctx, m)
	}
	return results
}

func (b *book) one(ctx context.Context, m *inbox.Message) error {
	select {
	case <-time.After(time.Duration(rand.IntN(20)) * time.Millisecond):
	case <-ctx.Done():
		return ctx.Err()
	}
	switch rand.IntN(20) {
	case 0, 1:
		return errors.New("boom")
	case 2:
		return inbox.Unavailable(errors.New("down"))
	case 3:
		if b.mode == parked {
			return inbox.Unrecoverable(errors.New("dead"))
		}
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.runs++
	if b.taken[m.ID] {
		return nil
	}
	b.taken[m.ID] = true
	if b.mode != shared && b.number[m.ID] != b.next[m.Key] {
		b.t.Errorf("number %d of %s takes effect while %d is due", b.number[m.ID], m.Key, b.next[m.Key])
	}
	b.next[m.Key]++
	return nil
}

func (b *book) left() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.number) - len(b.taken)
}

// mode is what a soak's consumers promise of their keys.
type mode string

const (
	shared  mode = "shared"
	ordered mode = "ordered"
	parked  mode = "parked" // keys wait for their dead letters, which are replayed
)

// keeper is a processor that keeps a ledger and keys that wait.
type keeper struct {
	*book
	ledger  driver.Ledger
	parking driver.Parking
}

func (k keeper) Ledger() driver.Ledger       { return k.ledger }
func (k keeper) Retention() time.Duration    { return driver.DefaultRetention }
func (k keeper) Parking(bool) driver.Parking { return k.parking }

// Several consumers that end and begin again, calls that fail in every way, and handlers that fail:
// no message is lost, and of ordered ones no key is ever out of order.
func TestSoak(t *testing.T) {
	t.Parallel()
	for _, m := range []mode{shared, ordered, parked} {
		for round := range 1 + testenv.Rounds(t) {
			t.Run(fmt.Sprintf("%s, round %d", m, round), func(t *testing.T) {
				t.Parallel()
				synctest.Test(t, func(t *testing.T) { soak(t, m) })
			})
		}
	}
}

func soak(t *testing.T, m mode) {
	t.Helper()
	const keys, each, processes = 64, 50, 4
	broker := inboxtest.NewBroker()
	b := &book{t: t, mode: m, number: map[uuid.UUID]int{}, next: map[string]int{}, taken: map[uuid.UUID]bool{}}
	var msgs []*inbox.Message
	for i := range keys * each {
		id := ids.Deterministic(time.Now(), fmt.Sprint(i))
		msgs = append(msgs, &inbox.Message{ID: id, Name: "event", Key: fmt.Sprintf("key-%d", i%keys), Body: []byte(`{}`)})
		b.number[id] = i / keys
	}
	cfg := inboxtest.Config{
		ConsumerConfig: inbox.ConsumerConfig{
			Ordered: m != shared, ParkKeys: m == parked, Concurrency: 8, Batch: 1 + rand.IntN(3), Prefetch: 100, ShutdownTimeout: 5 * time.Second,
			Retry:  inbox.RetryPolicy{MaxAttempts: 1000, BaseDelay: 10 * time.Millisecond, MaxDelay: 100 * time.Millisecond},
			Logger: slog.New(slog.DiscardHandler),
		},
		Fault: func(inboxtest.Step, *inbox.Message) inboxtest.Outcome {
			if rand.IntN(100) > 0 {
				return inboxtest.OK
			}
			if m != shared { // a message that is refused, or lost alone, is out of order by the script itself
				return []inboxtest.Outcome{inboxtest.FailBefore, inboxtest.FailAfter, inboxtest.Hang, inboxtest.EndSession}[rand.IntN(4)]
			}
			return inboxtest.FailBefore + inboxtest.Outcome(rand.IntN(int(inboxtest.Refuse)))
		},
	}
	p := keeper{b, memory.NewLedger(), memory.NewParking()}
	operator, err := inboxtest.NewConsumer(broker, "orders", p, cfg)
	if err != nil {
		t.Fatal(err)
	}
	var consumers sync.WaitGroup
	over := make(chan struct{})
	for range processes {
		c, err := inboxtest.NewConsumer(broker, "orders", p, cfg)
		if err != nil {
			t.Fatal(err)
		}
		consumers.Go(func() {
			for ended := false; !ended; {
				ctx, stop := context.WithTimeout(t.Context(), time.Duration(1+rand.IntN(20))*time.Second)
				go func() {
					select {
					case <-over:
						stop()
					case <-ctx.Done():
					}
				}()
				if err := c.Run(ctx); err != nil {
					t.Error(err)
				}
				stop()
				select {
				case <-over:
					ended = true
				default:
				}
			}
		})
	}
	for _, msg := range msgs {
		if err := broker.Send(t.Context(), msg); err != nil {
			t.Fatal(err)
		}
	}
	deadline := time.Now().Add(48 * time.Hour)
	for b.left() > 0 && time.Now().Before(deadline) {
		time.Sleep(time.Second)
		_, _ = operator.DeadLetters().Replay(t.Context(), inbox.Filter{}, inbox.Replay{By: "soak"}) // it may fail by the script
	}
	began := time.Now()
	if b.left() == 0 {
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		if err := broker.Idle(ctx); err != nil {
			t.Errorf("all have taken effect: %v", err)
		}
	}
	close(over)
	consumers.Wait()
	if n := b.left(); n > 0 {
		t.Errorf("%d messages have not taken effect", n)
	}
	t.Logf("%d runs of %d messages, idle after %v", b.runs, len(b.number), time.Since(began))
}
