package ratelimitredis_test

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	mathrand "math/rand/v2"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/internal/ratelimit/conformance"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/redistest"
	"github.com/holdfast-go/holdfast/ratelimit"
	"github.com/holdfast-go/holdfast/ratelimit/driver"
	"github.com/holdfast-go/holdfast/ratelimit/ratelimitredis"
	"github.com/holdfast-go/holdfast/ratelimit/ratelimittest"
)

// Random sequences of calls, with clocks that are moved together, get exactly the same answers from Memory and from
// Redis. A sequence is identified by its number.
func TestDifferentialMemoryAndRedis(t *testing.T) {
	t.Parallel()
	client := redistest.New(t)
	allowed, denied := 0, 0
	for n := range testenv.Sequences(t, 30) {
		var p *pair
		inBubble(t, func(m *bubbled) {
			p = newPair(t, client, m, n)
			for range 40 {
				p.step()
			}
		})
		if t.Failed() {
			t.Fatalf("sequence %d:\n%s", n, strings.Join(p.log, "\n"))
		}
		allowed, denied = allowed+len(p.taken), denied+p.denied
	}
	if t.Logf("%d allowed, %d denied", allowed, denied); allowed == 0 || denied == 0 {
		t.Error("too few to prove much")
	}
}

// pair sends the same calls to two limiters, and to a scripted one, which only checks the charges.
type pair struct {
	t        *testing.T
	random   *mathrand.Rand
	memory   *bubbled
	redis    conformance.Limiter
	scripted *ratelimittest.Limiter
	advance  func(t *testing.T, d time.Duration)
	limits   []ratelimit.Limit
	windows  bool // not only buckets
	taken    [][]ratelimit.Charge
	denied   int
	log      []string
}

func newPair(t *testing.T, client redis.UniversalClient, m *bubbled, n int) *pair {
	t.Helper()
	p := &pair{t: t, memory: m, random: mathrand.New(mathrand.NewPCG(3, uint64(n))), scripted: ratelimittest.New()}
	p.redis, p.advance = ratelimitredis.NewWithClock(t, client, ratelimitredis.Config{Prefix: "test:" + rand.Text(), Timeout: patient})
	p.windows = p.random.IntN(3) > 0
	for range 2 + p.random.IntN(3) {
		p.limits = append(p.limits, p.limit())
	}
	return p
}

// limit returns a limit with one of a few names and windows, so that some limits share a counter.
func (p *pair) limit() ratelimit.Limit {
	l := ratelimit.Limit{
		Name:      []string{"user", "global", "calls"}[p.random.IntN(3)],
		Max:       1 + p.random.Int64N(12),
		Window:    []time.Duration{0, time.Second, 1300 * time.Millisecond, time.Minute, time.Hour}[p.random.IntN(5)],
		Algorithm: ratelimit.TokenBucket,
	}
	if p.windows {
		l.Algorithm = ratelimit.Algorithm(p.random.IntN(3))
	}
	if l.Algorithm == ratelimit.TokenBucket && p.random.IntN(2) == 0 {
		l.Burst = 1 + p.random.Int64N(8)
	}
	if p.random.IntN(60) == 0 {
		l.Max = []int64{0, -1, 1 << 40, 1 << 60}[p.random.IntN(4)]
	}
	return l
}

func (p *pair) charges() (charges []ratelimit.Charge) {
	count := 1 + p.random.IntN(3)
	switch p.random.IntN(80) {
	case 0:
		count = 0
	case 1:
		count = driver.MaxCharges + 1
	case 2, 3, 4:
		count = 4 + p.random.IntN(5)
	}
	for range count {
		c := ratelimit.Charge{Limit: p.limits[p.random.IntN(len(p.limits))], Key: []string{"", "a", "b:{c}", strings.Repeat("long", 40)}[p.random.IntN(4)]}
		c.Cost = []int64{0, 1, 1, 1, 2, 3, 7, 13, 1 << 50, -1}[min(p.random.IntN(11), p.random.IntN(10))]
		charges = append(charges, c)
	}
	return charges
}

func (p *pair) step() {
	if p.random.IntN(3) == 0 {
		p.move()
	}
	charges := p.charges()
	switch n := p.random.IntN(20); {
	case n < 10:
		p.decide("Allow", charges, func(l conformance.Limiter) (ratelimit.Decision, error) {
			return l.Allow(p.t.Context(), charges...)
		})
	case n < 13:
		p.decide("Peek", charges, func(l conformance.Limiter) (ratelimit.Decision, error) {
			return l.Peek(p.t.Context(), charges...)
		})
	case n < 16:
		within := []time.Duration{0, 1, time.Second, 90 * time.Second, driver.MaxReserve, driver.MaxReserve + 1, -1}[p.random.IntN(7)]
		if p.random.IntN(3) > 0 {
			charges = p.reservable(charges)
		}
		p.decide(fmt.Sprint("Reserve within ", within), charges, func(l conformance.Limiter) (ratelimit.Decision, error) {
			return l.Reserve(p.t.Context(), within, charges...)
		})
	case n < 19:
		charges = p.refundable(charges)
		p.change("Refund", charges, func(l conformance.Limiter) error { return l.Refund(p.t.Context(), charges...) })
	default:
		p.change("Reset", charges, func(l conformance.Limiter) error { return l.Reset(p.t.Context(), charges...) })
	}
}

// move moves both clocks.
func (p *pair) move() {
	most := []time.Duration{time.Millisecond, 100 * time.Millisecond, time.Second, time.Minute, 3 * time.Hour}[p.random.IntN(5)]
	d := time.Duration(p.random.Int64N(int64(most/time.Millisecond)+1)) * time.Millisecond
	p.memory.advance(d)
	p.advance(p.t, d)
	p.note("clock %v to %v", d, p.memory.now().UnixMilli())
}

// reservable returns the charges that can be reserved.
func (p *pair) reservable(charges []ratelimit.Charge) []ratelimit.Charge {
	buckets := slices.DeleteFunc(slices.Clone(charges), func(c ratelimit.Charge) bool { return c.Limit.Algorithm != ratelimit.TokenBucket })
	if len(buckets) == 0 {
		return charges
	}
	return buckets
}

// refundable returns mostly charges that were taken: some of them again, in part, or without their time.
func (p *pair) refundable(made []ratelimit.Charge) []ratelimit.Charge {
	if len(p.taken) == 0 || p.random.IntN(6) == 0 {
		return made
	}
	charges := slices.Clone(p.taken[p.random.IntN(len(p.taken))])
	for i := range charges {
		switch p.random.IntN(8) {
		case 0:
			charges[i].Cost = 1 + p.random.Int64N(9)
		case 1:
			charges[i].At = time.Time{}
		}
	}
	return charges
}

func (p *pair) note(format string, args ...any) { p.log = append(p.log, fmt.Sprintf(format, args...)) }

func (p *pair) decide(what string, charges []ratelimit.Charge, ask func(l conformance.Limiter) (ratelimit.Decision, error)) {
	p.t.Helper()
	fromMemory, memoryErr := ask(p.memory)
	fromRedis, redisErr := ask(p.redis)
	p.note("%s %s: %s", what, tell(charges), answer(fromMemory, memoryErr))
	if a, b := answer(fromMemory, memoryErr), answer(fromRedis, redisErr); a != b {
		p.t.Errorf("%s %s:\nMemory %s\n Redis %s", what, tell(charges), a, b)
	}
	p.scripted.Next(fromMemory, memoryErr)
	scripted, err := ask(p.scripted)
	if scripted.Allowed != fromMemory.Allowed || scripted.RetryAfter != fromMemory.RetryAfter || scripted.Delay != fromMemory.Delay && !strings.HasPrefix(what, "Peek") ||
		errors.Is(err, ratelimit.ErrInvalid) != errors.Is(memoryErr, ratelimit.ErrInvalid) || len(scripted.Charges()) != len(fromMemory.Charges()) {
		p.t.Errorf("%s %s:\n Memory %s\nscripted %s", what, tell(charges), answer(fromMemory, memoryErr), answer(scripted, err))
	}
	p.scripted = ratelimittest.New() // clears the rest of the script after a rejected call
	if taken := fromMemory.Charges(); taken != nil {
		p.taken = append(p.taken, taken)
	}
	if fromMemory.Denied != "" {
		p.denied++
	}
}

func (p *pair) change(what string, charges []ratelimit.Charge, ask func(l conformance.Limiter) error) {
	p.t.Helper()
	memoryErr, redisErr, scriptedErr := ask(p.memory), ask(p.redis), ask(p.scripted)
	p.note("%s %s: %v", what, tell(charges), memoryErr)
	if fmt.Sprint(memoryErr) != fmt.Sprint(redisErr) || fmt.Sprint(memoryErr) != fmt.Sprint(scriptedErr) {
		p.t.Errorf("%s %s:\nMemory %v\n Redis %v\nscripted %v", what, tell(charges), memoryErr, redisErr, scriptedErr)
	}
}

// answer returns all parts of a decision that a caller can see.
func answer(d ratelimit.Decision, err error) string {
	if err != nil {
		return "error: " + err.Error()
	}
	binding, bound := d.Binding()
	return fmt.Sprintf("allowed %v, never %v, fallback %v, cached %v, denied %q, retry %v, delay %v, at %v, limits %+v, binding %+v %v, charges %s",
		d.Allowed, d.Never, d.Fallback, d.Cached, d.Denied, d.RetryAfter, d.Delay, d.At.UnixMilli(), d.Limits(), binding, bound, tell(d.Charges()))
}

func tell(charges []ratelimit.Charge) string {
	var b strings.Builder
	for _, c := range charges {
		at := "now"
		if !c.At.IsZero() {
			at = fmt.Sprint(c.At.UnixMilli())
		}
		fmt.Fprintf(&b, "[%s %d/%v algorithm %d burst %d key %.6q cost %d at %s]", c.Limit.Name, c.Limit.Max, c.Limit.Window, c.Limit.Algorithm, c.Limit.Burst, c.Key, c.Cost, at)
	}
	return b.String()
}

// bubbled is a Memory in a synctest bubble, called from outside, where server calls take real time. So its clock
// moves only on request. It starts at ratelimitredis.Start.
type bubbled struct {
	calls  chan func()
	memory *ratelimit.Memory
}

// inBubble runs body outside a bubble, with a Memory inside the bubble.
func inBubble(t *testing.T, body func(m *bubbled)) {
	t.Helper()
	m := &bubbled{calls: make(chan func())}
	over := make(chan struct{})
	go func() {
		defer close(over)
		defer close(m.calls)
		body(m)
	}()
	synctest.Test(t, func(t *testing.T) {
		var err error
		if m.memory, err = ratelimit.NewMemory(ratelimit.MemoryConfig{}); err != nil {
			t.Error(err)
		}
		for call := range m.calls {
			call()
		}
	})
	<-over
}

// do runs f in the bubble.
func (m *bubbled) do(f func()) {
	done := make(chan struct{})
	m.calls <- func() {
		f()
		close(done)
	}
	<-done
}

// now returns the bubble's time.
func (m *bubbled) now() (now time.Time) {
	m.do(func() { now = time.Now() })
	return now
}

func (m *bubbled) advance(d time.Duration) { m.do(func() { time.Sleep(d) }) } // timing: in a bubble

func (m *bubbled) Allow(ctx context.Context, charges ...ratelimit.Charge) (d ratelimit.Decision, err error) {
	m.do(func() { d, err = m.memory.Allow(ctx, charges...) })
	return d, err
}

func (m *bubbled) Reserve(ctx context.Context, within time.Duration, charges ...ratelimit.Charge) (d ratelimit.Decision, err error) {
	m.do(func() { d, err = m.memory.Reserve(ctx, within, charges...) })
	return d, err
}

func (m *bubbled) Peek(ctx context.Context, charges ...ratelimit.Charge) (d ratelimit.Decision, err error) {
	m.do(func() { d, err = m.memory.Peek(ctx, charges...) })
	return d, err
}

func (m *bubbled) Refund(ctx context.Context, charges ...ratelimit.Charge) (err error) {
	m.do(func() { err = m.memory.Refund(ctx, charges...) })
	return err
}

func (m *bubbled) Reset(ctx context.Context, charges ...ratelimit.Charge) (err error) {
	m.do(func() { err = m.memory.Reset(ctx, charges...) })
	return err
}
