package ratelimit

import (
	"context"
	"errors"
	"net/http"
	"slices"
	"sync"
)

// taken is what a request was charged.
type taken struct {
	limiter  Limiter
	refunds  Limiter // bounds what is given back
	decision Decision
	header   http.Header // of the answer; nil in shadow
	legacy   bool
	outer    *taken // by another middleware before this one

	mu   sync.Mutex
	done bool
}

type takenKey struct{}

// remember lets the handlers inside find what the request was charged.
func (h *handler) remember(w http.ResponseWriter, r *http.Request, d Decision) *http.Request {
	t := &taken{limiter: h.limiter, refunds: h.refunds, decision: d, legacy: h.cfg.LegacyHeaders}
	if h.cfg.Shadow == nil {
		t.header = w.Header()
	}
	t.outer, _ = r.Context().Value(takenKey{}).(*taken)
	return r.WithContext(context.WithValue(r.Context(), takenKey{}, t))
}

// RefundFrom gives back what the request of ctx was charged, for a request that turns out to be free,
// such as the replay of an answer, also if its client has gone meanwhile. Call it before the answer is
// written: the headers then tell of the refund. Further calls do nothing, also after ErrUnavailable:
// units given back twice would be somebody else's. Outside the middleware it does nothing.
//
// Of each limit and key a process gives back at most ten times what the limit admits: what is free is
// bounded too. Requests beyond that stay charged, which is no error.
func RefundFrom(ctx context.Context) error {
	var errs []error
	for t, _ := ctx.Value(takenKey{}).(*taken); t != nil; t = t.outer {
		errs = append(errs, t.refund(ctx))
	}
	return errors.Join(errs...)
}

func (t *taken) refund(ctx context.Context) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	charges := t.decision.Charges()
	if t.done || len(charges) == 0 {
		return nil
	}
	t.done = true
	ctx = context.WithoutCancel(ctx)
	if d, err := t.refunds.Allow(ctx, allowances(charges)...); err != nil || !d.Allowed {
		return err
	}
	if err := t.limiter.Refund(ctx, charges...); err != nil {
		return err
	}
	if t.header != nil {
		writeHeaders(t.header, t.decision.refunded(), t.legacy)
	}
	return nil
}

// refundsPerUnit is how many units are given back for each that a limit admits.
const refundsPerUnit = 10

// allowances are charges to the limits of what is given back.
func allowances(charges []Charge) []Charge {
	wider := slices.Clone(charges)
	for i := range wider {
		l := &wider[i].Limit
		l.Max, l.Burst = refundsPerUnit*l.Max, refundsPerUnit*l.Burst
		if l.Validate() != nil { // too large to count exactly
			*l = charges[i].Limit
		}
	}
	return wider
}
