package engine

import (
	"errors"
	"log/slog"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
)

func TestRefusals(t *testing.T) {
	t.Parallel()
	var r refusals
	now := time.Unix(1_700_000_000, 0)
	if place, _, _ := r.latest(); place != "" {
		t.Errorf("%q refuses", place)
	}
	if !r.note("a", errTest, now) || r.note("a", errTest, now.Add(refusalLog)) || !r.note("a", errTest, now.Add(refusalLog+1)) {
		t.Error("a place is named every 30 seconds")
	}
	r.note("b", errTest, now.Add(time.Minute))
	if place, until, err := r.latest(); place != "b" || !errors.Is(err, errTest) || until != now.Add(time.Minute+refusalAge) {
		t.Errorf("%q, %v, %v", place, err, until)
	}
	last := time.Duration(0)
	for range 3000 {
		d := r.pause(now)
		if d < last || d > maxSlot {
			t.Fatalf("pause %v after %v", d, last)
		}
		last = d
	}
	if last != maxSlot || !r.clear("b") || r.clear("b") || r.pause(now) > time.Second {
		t.Errorf("the pauses of many grow to %v", last)
	}
}

// TestRefusedGoesOn follows a message whose places refuse it one after the other.
func TestRefusedGoesOn(t *testing.T) {
	t.Parallel()
	cfg := &settings{Config: Config{Queue: "q", ConsumerConfig: inbox.ConsumerConfig{Concurrency: 1, Prefetch: 10, Batch: 1, Rand: rand.Float64, Logger: slog.New(slog.DiscardHandler)}}}
	signals, err := newSignals(cfg, nil)
	if err != nil {
		t.Fatal(err)
	}
	h := newHand(cfg)
	v := &moves{cfg: cfg, hand: h, receipts: &receipts{cfg: cfg, hand: h, signals: signals, next: &settlement{}, spare: &settlement{}}}
	it := newItem()
	now := time.Unix(1_700_000_000, 0)
	h.add(it, now)
	f := &fate{kind: hasFailed, failure: driver.Failure{Err: errTest, Class: "validation"}, decision: driver.Decision{Action: driver.ActionDead}}
	it.fate = f
	v.send(it, send(cfg, it.m, f), now)
	settle := func(err error) {
		t.Helper()
		r := v.batch(now)
		if r == nil || r.items[0] != it {
			t.Fatal("it is not moved")
		}
		v.taken(r, now)
		if v.batch(now) != nil {
			t.Fatal("it is moved twice")
		}
		r.errs = []error{err}
		v.moved(r, now)
	}
	if it.order.target != driver.ToDead {
		t.Fatalf("%+v", it.order)
	}
	settle(driver.ErrUnavailable)
	if v.batch(now) != nil {
		t.Error("at once again")
	}
	now = now.Add(time.Second)
	settle(driver.ErrRefused)
	if it.order.target != driver.ToLater || it.order.outcome != displaced || it.order.next.Attempt != 1 {
		t.Fatalf("%+v", it.order)
	}
	settle(errors.New("strange"))
	if it.order.target != driver.ToTail || it.state != held || len(h.timed) != 1 {
		t.Fatalf("%+v", it.order)
	}
	now = it.due
	for _, due := range h.due(now) {
		v.due(due)
	}
	settle(driver.ErrRefused)
	if len(v.receipts.next.backs) != 1 || h.all.n != 0 || h.crowd.n != 0 || len(v.pending)+len(v.under) != 0 {
		t.Errorf("%d given back, %d in hand", len(v.receipts.next.backs), h.all.n)
	}
}
