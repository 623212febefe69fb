package sim

import (
	"context"
	"time"

	"github.com/holdfast-go/holdfast/examples/reservation/shoptest"
)

// visit is what the rate limiter has done with a request.
type visit struct {
	user   string
	at     int64 // when it was charged, in milliseconds by the limiter's clock; 0: it was not
	passed bool  // it asked for its key, which comes after the limit
	free   bool  // its unit was given back
}

type visitKey struct{}

func (q request) visit(ctx context.Context) context.Context {
	return context.WithValue(ctx, visitKey{}, &visit{user: q.user})
}

// charged is what has happened to the counters of the limits.
type charged struct {
	what  change
	visit *visit // nil: of all users
}

type change int

const (
	took     change = iota // a unit, or nothing where the request is denied
	gaveBack               // a unit
	forgot                 // all counters
)

// watch notes what a request asks of the limiter, in the order in which the limiter does it.
func (h *history) watch(ctx context.Context, step string, do func() error) func() error {
	v, _ := ctx.Value(visitKey{}).(*visit)
	if v == nil {
		return do
	}
	switch step {
	case shoptest.StepKey:
		h.mu.Lock()
		defer h.mu.Unlock()
		v.passed = true
		if v.at == 0 {
			h.uncharged = append(h.uncharged, v.user)
		}
	case shoptest.StepLimit:
		return func() error { return h.note(took, v, do) }
	case shoptest.StepRefund:
		return func() error { return h.note(gaveBack, v, do) }
	}
	return do
}

// note does something to the counters, and notes it. Nothing else is done to them meanwhile.
func (h *history) note(what change, v *visit, do func() error) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if err := do(); err != nil {
		return err
	}
	switch {
	case what == took:
		v.at = time.Now().UnixMilli()
	case what == gaveBack && v.free:
		return nil // a unit is given back once
	case what == gaveBack:
		v.free = true
	}
	h.charges = append(h.charges, charged{what, v})
	return nil
}

// limitWindow is that of the shop's limit.
const limitWindow = time.Minute

// limits: within no window does a user pass more often than the limit, as a sliding window counts. What was
// given back does not count, nor what was charged before the counters were lost: each loss allows the limit
// once more.
func (c *checker) limits() {
	const w = int64(limitWindow / time.Millisecond)
	type window struct {
		user   string
		number int64
	}
	counts := map[window]int64{}
	for _, one := range c.history.charges {
		v := one.visit
		switch {
		case one.what == forgot:
			clear(counts)
			continue
		case one.what == took && !v.passed:
			continue // denied, or the answer did not arrive
		}
		in := window{v.user, v.at / w}
		if one.what == gaveBack {
			counts[in] = max(0, counts[in]-1)
			continue
		}
		counts[in]++
		before := counts[window{v.user, in.number - 1}]
		if before*(w-v.at%w)+counts[in]*w > c.history.limit*w {
			c.found("%s passed for the %d. time in a minute, after %d times in the one before: the limit is %d", v.user, counts[in], before, c.history.limit)
		}
	}
	for _, user := range c.history.uncharged {
		c.found("a request of %s passed the limit and was not charged", user)
	}
}
