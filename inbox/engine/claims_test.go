package engine_test

import (
	"context"
	"errors"
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

// left puts messages of a key into the Parking, as a process leaves them there that has ended.
func (y *yard) left(key string, numbers ...int) {
	y.t.Helper()
	for _, n := range numbers {
		m := &inbox.Message{ID: ids.New(), Name: "order", Key: key, Attempt: 1}
		y.number[m.ID] = n
		noError(y.t, y.parking.Append(y.t.Context(), key, m))
	}
}

// crowdOf has the yard count how many handlers run at once, each for a time.
func (y *yard) crowdOf(takes time.Duration) (most *atomic.Int32) {
	var now atomic.Int32
	most = new(atomic.Int32)
	y.fail = func(*inbox.Message) error {
		most.Store(max(now.Add(1), most.Load()))
		time.Sleep(takes)
		now.Add(-1)
		return nil
	}
	return most
}

func patient(cfg *engine.Config) { cfg.HandlerTimeout, cfg.Prefetch = 10*time.Minute, 50 }

// However long a handler runs, a standby does not run the message beside it.
func TestParkedMessageOfASlowOwner(t *testing.T) {
	bubble(t, func(t *testing.T) {
		y := newYard(t)
		most := y.crowdOf(2 * time.Minute)
		y.left("a", 1, 2, 3)
		for range 3 {
			run(t, y.consumer(patient, memqueue.Options{}))
		}
		time.Sleep(20 * time.Minute)
		if got := y.orderOf("a"); !slices.Equal(got, []int{1, 2, 3}) || len(y.parked()) > 0 {
			t.Errorf("done %v, parked %v", got, y.parked())
		}
		if n := most.Load(); n != 1 {
			t.Errorf("%d handlers ran at once", n)
		}
	})
}

// severed is a Parking that a process does not reach any more.
type severed struct {
	driver.Parking
	cut *atomic.Bool
}

var errSevered = errors.New("no route")

func (s severed) Renew(ctx context.Context, l driver.Lease, messages []uuid.UUID) ([]uuid.UUID, error) {
	if s.cut.Load() {
		return nil, errSevered
	}
	return s.Parking.Renew(ctx, l, messages)
}

func (s severed) Claim(ctx context.Context, key string, l driver.Lease) (*inbox.Message, bool, error) {
	if s.cut.Load() {
		return nil, false, errSevered
	}
	return s.Parking.Claim(ctx, key, l)
}

// An owner that does not reach the place ends its handler before another process goes on with the key,
// within 45 s. What the late one does then ends nothing.
func TestParkedMessageOfALostOwner(t *testing.T) {
	bubble(t, func(t *testing.T) {
		y := newYard(t)
		y.left("a", 1, 2)
		parking := y.parking
		var cut atomic.Bool
		ended, begun := make(chan time.Time, 1), make(chan time.Time, 1)
		let := make(chan struct{})
		late := processorFunc(func(ctx context.Context, _ *inbox.Message) error {
			<-ctx.Done()
			ended <- time.Now()
			<-let
			return inbox.Unrecoverable(errBroken)
		})
		cfg := engine.Config{ConsumerConfig: inbox.ConsumerConfig{Ordered: true, ParkKeys: true, HandlerTimeout: time.Hour}}
		stop := run(t, newConsumer(t, y.queue.Source(memqueue.Options{Exclusive: true}), withParking{withLedger{late, y.ledger}, severed{parking, &cut}}, cfg))
		time.Sleep(10 * time.Minute) // the claim is renewed
		y.fail = func(m *inbox.Message) error {
			if y.numberOf(m) == 1 {
				begun <- time.Now()
				time.Sleep(time.Minute)
			}
			return nil
		}
		run(t, y.consumer(patient, memqueue.Options{}))
		time.Sleep(time.Minute)
		if len(begun) > 0 || len(ended) > 0 {
			t.Fatal("the claim has not held")
		}
		cut.Store(true)
		at := time.Now()
		first, second := <-ended, <-begun
		if second.Sub(first) < time.Second || second.Sub(at) > 45*time.Second {
			t.Errorf("the first handler has ended after %v, the other one has begun after %v", first.Sub(at), second.Sub(at))
		}
		close(let)
		cut.Store(false)
		time.Sleep(30 * time.Second)
		stop() // else it may be the one that gets the next message, and keep it for an hour
		time.Sleep(10 * time.Minute)
		if got := y.orderOf("a"); !slices.Equal(got, []int{1, 2}) || len(y.parked()) > 0 || y.count() > 0 {
			t.Errorf("done %v, parked %v, %d dead letters", got, y.parked(), y.count())
		}
	})
}

// A process that ends in good order leaves no claims: the next one need not wait for their end.
func TestParkedMessageOfAnOwnerThatEnds(t *testing.T) {
	bubble(t, func(t *testing.T) {
		y := newYard(t)
		y.left("a", 1)
		y.fail = func(*inbox.Message) error { return errBroken }
		stop := run(t, y.consumer(func(cfg *engine.Config) {
			cfg.Retry = inbox.RetryPolicy{BaseDelay: time.Hour, MaxDelay: time.Hour}
		}, memqueue.Options{}))
		time.Sleep(time.Minute)
		stop()
		y.fail = func(*inbox.Message) error { return nil }
		run(t, y.consumer(func(*engine.Config) {}, memqueue.Options{}))
		y.put("b", 1)
		time.Sleep(5 * time.Second)
		if got := y.orderOf("a"); !slices.Equal(got, []int{1}) {
			t.Errorf("done %v", got)
		}
	})
}

// Another process may store a message while this one processes it: it is not run beside itself.
func TestParkedMessageThatRunsAlready(t *testing.T) {
	bubble(t, func(t *testing.T) {
		y := newYard(t)
		most := y.crowdOf(2 * time.Minute)
		run(t, y.consumer(patient, memqueue.Options{}))
		id := y.put("a", 1)
		time.Sleep(time.Second)
		noError(t, y.parking.Append(t.Context(), "a", &inbox.Message{ID: id, Name: "order", Key: "a", Attempt: 1}))
		time.Sleep(time.Minute)
		y.put("a", 2)
		time.Sleep(10 * time.Minute)
		if got := y.orderOf("a"); !slices.Equal(got, []int{1, 2}) || most.Load() != 1 || len(y.parked()) > 0 {
			t.Errorf("done %v, %d at once, parked %v", got, most.Load(), y.parked())
		}
	})
}

// A claim that could not be renewed for a while costs its message nothing, although others go through.
func TestParkedMessageWhoseClaimIsNotRenewed(t *testing.T) {
	bubble(t, func(t *testing.T) {
		y := newYard(t)
		y.left("a", 1, 2)
		var cut atomic.Bool
		y.parking = severed{y.parking, &cut}
		var calls atomic.Int32
		quick := processorFunc(func(ctx context.Context, m *inbox.Message) error {
			if m.Key != "a" {
				return nil
			}
			if m.Attempt != 1 {
				t.Errorf("attempt %d", m.Attempt)
			}
			calls.Add(1)
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-time.After(time.Minute):
				return y.process(m)
			}
		})
		y.fail = func(*inbox.Message) error { return nil }
		cfg := engine.Config{ConsumerConfig: inbox.ConsumerConfig{Ordered: true, ParkKeys: true, HandlerTimeout: time.Hour}}
		run(t, newConsumer(t, y.queue.Source(memqueue.Options{Exclusive: true}), withParking{withLedger{quick, y.ledger}, y.parking}, cfg))
		for n := range 300 {
			y.put("b", n)
			time.Sleep(time.Second)
			cut.Store(n%100 < 40)
		}
		time.Sleep(10 * time.Minute)
		if got := y.orderOf("a"); !slices.Equal(got, []int{1, 2}) || y.count() > 0 || len(y.parked()) > 0 {
			t.Errorf("done %v, %d dead letters, parked %v", got, y.count(), y.parked())
		}
		if calls.Load() < 3 {
			t.Errorf("%d calls: no claim has ended", calls.Load())
		}
	})
}

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
			noError(t, y.parking.Append(t.Context(), m.Key, m))
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
		noError(t, y.parking.Stop(t.Context(), "a", dead))
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
