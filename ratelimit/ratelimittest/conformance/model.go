package conformance

import (
	"slices"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/ratelimit"
)

// model decides by brute force: it keeps every charge ever taken and looks at
// all of them each time, millisecond by millisecond for buckets.
type model struct {
	taken map[modelKey][]ratelimit.Charge // with At
}

type modelKey struct{ name, key string }

func keyOf(c ratelimit.Charge) modelKey { return modelKey{c.Limit.Name, c.Key} }

// free returns what a limit has to spare at now, in units times the window's
// milliseconds.
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

// tokens fills the bucket a millisecond at a time.
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

// forget drops what no longer counts: a bucket is full by then, if its charges
// are no more than it holds.
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

// giveBack forgets the last charge like c.
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
		t.Fatalf("%+v at %v: allowed is %v, the model says %v", charges, d.At, d.Allowed, want)
	}
	if d.Allowed {
		m.take(charges, d.At)
	} else {
		// Since a denial that is remembered, others may have charged the limits.
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
			t.Fatalf("%+v at %v: %d of limit %q remain, the model says %d", charges, d.At, state.Remaining, c.Limit.Name, want)
		}
	}
}
