package conformance

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/ratelimit"
)

// model decides by brute force. It keeps every charge and checks all of them each time; it computes buckets
// millisecond by millisecond.
type model struct {
	taken map[modelKey][]ratelimit.Charge // with At
}

type modelKey struct{ name, key string }

func keyOf(c ratelimit.Charge) modelKey { return modelKey{c.Limit.Name, c.Key} }

// free returns the free units of a limit at now, times the window's milliseconds.
func (m *model) free(c ratelimit.Charge, now int64) int64 {
	w := c.Limit.Window.Milliseconds()
	if c.Limit.Algorithm == ratelimit.TokenBucket {
		return m.tokens(c, now)
	}
	free := c.Limit.Max * w
	for _, old := range m.taken[keyOf(c)] {
		age := now/w - old.At.UnixMilli()/w
		switch {
		case age == 0:
			free -= old.Cost * w
		case age == 1 && c.Limit.Algorithm == ratelimit.SlidingWindow:
			free -= old.Cost * (w - now%w)
		}
	}
	return free
}

// tokens fills the bucket millisecond by millisecond.
func (m *model) tokens(c ratelimit.Charge, now int64) int64 {
	w := c.Limit.Window.Milliseconds()
	full := c.Limit.Burst * w
	tokens, at := full, int64(0)
	for _, old := range m.taken[keyOf(c)] {
		for ; at < old.At.UnixMilli() && tokens < full; at++ {
			tokens = min(full, tokens+c.Limit.Max)
		}
		at = old.At.UnixMilli()
		tokens -= old.Cost * w
	}
	for ; at < now && tokens < full; at++ {
		tokens = min(full, tokens+c.Limit.Max)
	}
	return tokens
}

func (m *model) admits(charges []ratelimit.Charge, at time.Time) bool {
	for _, c := range charges {
		if m.free(c, at.UnixMilli()) < c.Cost*c.Limit.Window.Milliseconds() {
			return false
		}
	}
	return true
}

func (m *model) take(charges []ratelimit.Charge, at time.Time) {
	for _, c := range charges {
		c.At = at
		m.taken[keyOf(c)] = append(m.forget(m.taken[keyOf(c)], at), c)
	}
}

// forget drops charges that no longer count. A bucket is full by then, unless it was charged more than it holds.
func (m *model) forget(taken []ratelimit.Charge, now time.Time) []ratelimit.Charge {
	if len(taken) == 0 {
		return nil
	}
	l := taken[0].Limit
	if l.Algorithm == ratelimit.TokenBucket {
		if full := time.Duration(l.Burst) * l.Window / time.Duration(l.Max); now.Sub(taken[len(taken)-1].At) > full { // timing: the model's own clock
			return nil
		}
		return taken
	}
	return slices.DeleteFunc(taken, func(c ratelimit.Charge) bool { return now.Sub(c.At) > 2*l.Window }) // timing: the model's own clock
}

// giveBack removes the last charge like c.
func (m *model) giveBack(c ratelimit.Charge, at time.Time) {
	taken := m.taken[keyOf(c)]
	for i := len(taken) - 1; i >= 0; i-- {
		if taken[i].At.Equal(at) && taken[i].Cost == c.Cost {
			m.taken[keyOf(c)] = append(taken[:i:i], taken[i+1:]...)
			return
		}
	}
}

func (m *model) check(t *testing.T, charges []ratelimit.Charge, d ratelimit.Decision) {
	t.Helper()
	if want := m.admits(charges, d.At); d.Allowed != want {
		t.Fatalf("%+v at %v: allowed is %v, the model has %v", charges, d.At, d.Allowed, want)
	}
	if d.Allowed {
		m.take(charges, d.At)
	} else {
		// After a cached denial, others may have charged the limits.
		if retry := d.At.Add(d.RetryAfter); d.RetryAfter <= 0 || !d.Cached && !m.admits(charges, retry) || m.admits(charges, retry.Add(-time.Millisecond)) {
			t.Fatalf("%+v at %v: retry after %v is not the first moment that admits it", charges, d.At, d.RetryAfter)
		}
	}
	if d.Cached {
		return
	}
	for _, state := range d.Limits() {
		i := slices.IndexFunc(charges, func(c ratelimit.Charge) bool { return c.Limit.Name == state.Name })
		c := charges[i]
		want := max(0, m.free(c, d.At.UnixMilli())) / c.Limit.Window.Milliseconds()
		if state.Remaining != want {
			t.Fatalf("%+v at %v: %d of limit %q remain, the model has %d", charges, d.At, state.Remaining, c.Limit.Name, want)
		}
	}
}

// testModel compares every answer in a random schedule with the model's answer. It uses the limiter's time, so the
// comparison is exact on a server too.
func testModel(t *testing.T, l Limiter) {
	s := newSchedule(t, l)
	for range 150 {
		if s.random.IntN(3) > 0 {
			pause(t, time.Duration(s.random.IntN(30))*time.Millisecond)
		}
		s.step()
	}
	if s.allowed < 10 || s.denied < 10 || s.refunded < 1 {
		t.Errorf("the schedule is too short to prove much: %d allowed, %d denied, %d refunded", s.allowed, s.denied, s.refunded)
	}
}

// TestSchedules compares a limiter with a manual clock with the model, over a long time. Every denial is repeated one
// millisecond before its RetryAfter is over, and again when it is over. advance must not affect the clock of a cache
// of denials.
func TestSchedules(t *testing.T, l Limiter, advance func(t *testing.T, d time.Duration), steps int) {
	s := newSchedule(t, l)
	s.advance = advance
	longest := []time.Duration{time.Millisecond, 50 * time.Millisecond, 900 * time.Millisecond, 5 * time.Second, time.Hour}
	for range steps {
		if s.random.IntN(3) == 0 {
			most := longest[min(s.random.IntN(len(longest)), s.random.IntN(len(longest)))]
			advance(t, time.Duration(s.random.Int64N(int64(most/time.Millisecond)+1))*time.Millisecond)
		}
		s.step()
	}
	if s.allowed < steps/20 || s.denied < steps/20 || s.refunded < steps/200 || s.retried < steps/20 {
		t.Errorf("the schedule is too short to prove much: %d allowed, %d denied, %d refunded, %d retried", s.allowed, s.denied, s.refunded, s.retried)
	}
}

// schedule sends random calls to a limiter and compares the answers.
type schedule struct {
	t       *testing.T
	l       Limiter
	random  *rand.Rand
	model   *model
	limits  []ratelimit.Limit
	advance func(t *testing.T, d time.Duration) // nil: real time

	refundable                         []ratelimit.Decision
	allowed, denied, refunded, retried int
}

func newSchedule(t *testing.T, l Limiter) *schedule {
	t.Helper()
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	return &schedule{
		t: t, l: l, random: rand.New(rand.NewPCG(1, seed)),
		model: &model{taken: map[modelKey][]ratelimit.Charge{}},
		limits: []ratelimit.Limit{
			{Name: "user", Max: 5, Window: time.Second},
			{Name: "global", Max: 17, Window: 1300 * time.Millisecond},
			{Name: "fixed", Max: 11, Window: 1100 * time.Millisecond, Algorithm: ratelimit.FixedWindow},
			{Name: "tokens", Max: 9, Window: time.Second, Algorithm: ratelimit.TokenBucket, Burst: 6},
		},
	}
}

func (s *schedule) step() {
	s.t.Helper()
	if n := len(s.refundable); n > 0 && s.random.IntN(12) == 0 {
		s.refund(s.refundable[s.random.IntN(n)])
		s.refundable = nil
	}
	charges := s.charges()
	if len(charges) == 0 {
		return
	}
	if s.random.IntN(8) == 0 {
		s.peek(charges)
	}
	d := s.ask(charges)
	switch {
	case !d.Allowed:
		if s.advance != nil && d.RetryAfter > 0 {
			s.retry(charges, d)
		}
	case charges[len(charges)-1].Limit.Algorithm != ratelimit.TokenBucket:
		s.refundable = append(s.refundable, d)
	case s.advance != nil && s.random.IntN(6) == 0: // at once, before the bucket regains tokens
		s.refund(d)
	}
}

func (s *schedule) charges() (charges []ratelimit.Charge) {
	for i, limit := range s.limits {
		c := ratelimit.Charge{Limit: limit, Cost: 1 + int64(s.random.IntN(3))}
		if i == 0 {
			c.Key = string(rune('a' + s.random.IntN(2)))
		}
		if s.random.IntN(3) > 0 {
			charges = append(charges, c)
		}
	}
	return charges
}

func (s *schedule) ask(charges []ratelimit.Charge) ratelimit.Decision {
	s.t.Helper()
	d := allow(s.t, s.l, charges...)
	s.model.check(s.t, charges, d)
	if d.Allowed {
		s.allowed++
	} else {
		s.denied++
	}
	return d
}

// retry repeats a denied call 1 ms before its RetryAfter is over, and when it is over.
func (s *schedule) retry(charges []ratelimit.Charge, denied ratelimit.Decision) {
	s.t.Helper()
	s.advance(s.t, denied.RetryAfter-time.Millisecond)
	if s.ask(charges).Allowed {
		s.t.Fatalf("%+v: allowed 1 ms before RetryAfter", charges)
	}
	s.advance(s.t, time.Millisecond)
	if !s.ask(charges).Allowed {
		s.t.Fatalf("%+v: denied at RetryAfter", charges)
	}
	s.retried++
}

func (s *schedule) peek(charges []ratelimit.Charge) {
	s.t.Helper()
	d, err := s.l.Peek(s.t.Context(), charges...)
	if err != nil || d.Charges() != nil {
		s.t.Fatalf("peek: %+v, %v", d, err)
	}
	if want := s.model.admits(charges, d.At); d.Allowed != want {
		s.t.Fatalf("%+v at %v: Peek returned %v, the model has %v", charges, d.At, d.Allowed, want)
	}
}

func (s *schedule) refund(d ratelimit.Decision) {
	s.t.Helper()
	if err := s.l.Refund(s.t.Context(), d.Charges()...); err != nil {
		s.t.Fatal(err)
	}
	for _, c := range d.Charges() {
		s.model.giveBack(c, d.At)
	}
	s.refunded++
}

// TestClockSetBack sets the clock of a limiter back. A bucket keeps its tokens and regains from there. A window
// continues to count if the clock stays within it. advance is like in TestSchedules; d is negative.
func TestClockSetBack(t *testing.T, l Limiter, advance func(t *testing.T, d time.Duration)) {
	for n, step := range []time.Duration{time.Millisecond, 10 * time.Second, 59 * time.Second, time.Hour, 24 * time.Hour} {
		for _, held := range []int{1, 0} {
			c := ratelimit.Charge{Key: fmt.Sprint(n, held), Limit: ratelimit.Limit{Name: "calls", Max: 60, Burst: 3, Algorithm: ratelimit.TokenBucket}}
			if got := admitted(t, l, 3-held, c); got != 3-held {
				t.Fatalf("the bucket gave %d, want %d", got, 3-held)
			}
			advance(t, -step)
			if d, err := l.Peek(t.Context(), c); err != nil || d.Allowed != (held > 0) {
				t.Errorf("set back by %v with %d left: Peek returned %+v, %v", step, held, d, err)
			}
			if got := admitted(t, l, 5, c); got != held {
				t.Errorf("set back by %v with %d left: %d were admitted", step, held, got)
			}
			if d := allow(t, l, c); d.RetryAfter != time.Second {
				t.Errorf("set back by %v with %d left: RetryAfter is %v, want 1s", step, held, d.RetryAfter)
			}
			advance(t, time.Second)
			if got := admitted(t, l, 5, c); got != 1 {
				t.Errorf("set back by %v with %d left: %d were admitted a second later, want 1", step, held, got)
			}
		}
	}
	for _, a := range []ratelimit.Algorithm{ratelimit.SlidingWindow, ratelimit.FixedWindow} {
		c := ratelimit.Charge{Key: fmt.Sprint(a), Limit: ratelimit.Limit{Name: "daily", Max: 3, Window: day, Algorithm: a}}
		now := allow(t, l, c).At
		back := now.Sub(now.Truncate(day)) / 2
		advance(t, -back)
		d := allow(t, l, c)
		if !d.At.Equal(now.Add(-back.Truncate(time.Millisecond))) || d.Limits()[0].Remaining != 1 {
			t.Errorf("algorithm %d, set back within its window: %+v of %v at %v", a, d.Limits(), now, d.At)
		}
		advance(t, back) // timing: times returned by the limiter
		if got := admitted(t, l, 5, c); got != 1 {
			t.Errorf("algorithm %d, clock corrected: %d were admitted, want 1", a, got)
		}
	}
}
