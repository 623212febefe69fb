package engine_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/engine"
	"github.com/holdfast-go/holdfast/inbox/internal/memqueue"
	"github.com/holdfast-go/holdfast/internal/ids"
)

// countingParking counts the messages that were read and not deleted.
type countingParking struct {
	driver.Parking
	out, most *atomic.Int32
}

func (p countingParking) Claim(ctx context.Context, key string, l driver.Lease) (*inbox.Message, bool, error) {
	m, there, err := p.Parking.Claim(ctx, key, l)
	if m != nil {
		p.most.Store(max(p.out.Add(1), p.most.Load()))
	}
	return m, there, err
}

func (p countingParking) Done(ctx context.Context, owner uuid.UUID, m *inbox.Message) error {
	p.out.Add(-1)
	return p.Parking.Done(ctx, owner, m)
}

// However many keys go on at once, no more of their messages are in memory than the prefetch, and all
// keys have their turn soon.
func TestParkedKeysThatGoOnAtOnce(t *testing.T) {
	bubble(t, func(t *testing.T) {
		const keys, each, window = 300, 2, 10
		y := newYard(t)
		y.fail = func(*inbox.Message) error { return nil }
		counting := countingParking{y.parking, new(atomic.Int32), new(atomic.Int32)}
		y.parking = counting
		for n := range keys * each {
			m := &inbox.Message{ID: ids.New(), Name: "order", Key: fmt.Sprint(n % keys), Attempt: 1}
			y.number[m.ID] = n
			if err := y.parking.Append(t.Context(), m.Key, m); err != nil {
				t.Fatal(err)
			}
		}
		run(t, y.consumer(func(cfg *engine.Config) { cfg.Prefetch = window }, memqueue.Options{}))
		y.put("other", 1)
		time.Sleep(10 * time.Second)
		if left := y.parked(); len(left) > 0 {
			t.Errorf("%d keys are left", len(left))
		}
		if most := counting.most.Load(); most > window {
			t.Errorf("%d messages were in memory, want at most %d", most, window)
		}
	})
}

// hangingParking answers no question about keys until the call is given up.
type hangingParking struct{ driver.Parking }

func (hangingParking) Heads(ctx context.Context, _ string, _ int) ([]driver.Head, error) {
	<-ctx.Done()
	return nil, ctx.Err()
}

// A stop does not wait for the keys to be read.
func TestStopWhileParkedKeysAreNotRead(t *testing.T) {
	bubble(t, func(t *testing.T) {
		y := newYard(t)
		y.fail = func(*inbox.Message) error { return nil }
		y.parking = hangingParking{y.parking}
		stop := run(t, y.consumer(func(cfg *engine.Config) { cfg.ShutdownTimeout = time.Minute }, memqueue.Options{}))
		y.put("a", 1)
		time.Sleep(time.Second)
		began := time.Now()
		stop()
		if took := time.Since(began); took > 5*time.Second {
			t.Errorf("the stop took %v", took)
		}
	})
}

// When so many messages wait as may, others of their keys stay with the broker: the consumer pauses, says
// so, and goes on by itself when an operator has freed the key.
func TestParkedMessagesAreBounded(t *testing.T) {
	bubble(t, func(t *testing.T) {
		const most, window, each = 15, 10, 40
		y := newYard(t)
		y.fail = func(m *inbox.Message) error {
			if y.numberOf(m) == 1 && m.Key == "a" {
				return inbox.Unrecoverable(errBroken)
			}
			return nil
		}
		c := y.consumer(func(cfg *engine.Config) {
			cfg.MaxParked, cfg.Prefetch, cfg.Concurrency = most, window, 4
		}, memqueue.Options{})
		run(t, c)
		var want []int
		for n := 1; n <= each; n++ {
			y.put("a", n)
			want = append(want, n)
		}
		y.put("b", 1)
		for range 20 {
			time.Sleep(time.Minute)
			if n, err := y.parking.Count(t.Context(), each); n != most || err != nil {
				t.Fatalf("%d messages wait, error %v, want %d", n, err, most)
			}
			if err := c.Ready(t.Context()); err == nil || !strings.Contains(err.Error(), "MaxParked") {
				t.Fatalf("Ready: %v", err)
			}
		}
		if got := y.orderOf("b"); len(got) > 0 {
			t.Errorf("b has done %v: the messages in hand are not bounded", got)
		}
		if n, err := y.letters().Remove(t.Context(), inbox.Filter{}, inbox.Removal{By: "test"}); n != 1 || err != nil {
			t.Fatalf("removed %d, error %v", n, err)
		}
		time.Sleep(10 * time.Minute)
		if got := y.orderOf("a"); !slices.Equal(got, want[1:]) || len(y.orderOf("b")) != 1 || len(y.parked()) > 0 {
			t.Errorf("in the end a has done %v, b %v, parked %v", got, y.orderOf("b"), y.parked())
		}
		if err := c.Ready(t.Context()); err != nil {
			t.Errorf("Ready in the end: %v", err)
		}
	})
}

// What others have stored counts, too.
func TestParkedMessagesOfBeforeAreBounded(t *testing.T) {
	bubble(t, func(t *testing.T) {
		const most = 50
		y := newYard(t)
		y.fail = func(*inbox.Message) error { return nil }
		dead := driver.NewDeadLetter(&inbox.Message{ID: ids.New(), Name: "order", Key: "a"}, driver.Classify(errBroken), "test", time.Now())
		if err := y.parking.Stop(t.Context(), "a", dead); err != nil {
			t.Fatal(err)
		}
		for n := range most {
			y.left("a", n)
		}
		c := y.consumer(func(cfg *engine.Config) { cfg.MaxParked = most }, memqueue.Options{})
		run(t, c)
		time.Sleep(time.Minute)
		y.put("a", most)
		time.Sleep(time.Minute)
		if n, err := y.parking.Count(t.Context(), 2*most); n != most+1 || err != nil {
			t.Errorf("%d messages wait, error %v", n, err)
		}
		if err := c.Ready(t.Context()); err == nil || !strings.Contains(err.Error(), "MaxParked") {
			t.Errorf("Ready: %v", err)
		}
	})
}
