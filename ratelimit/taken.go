package ratelimit

import (
	"context"
	"errors"
	"net/http"
	"sync"
)

// taken is what a request was charged.
type taken struct {
	limiter  Limiter
	decision Decision
	header   http.Header // of the answer; nil in shadow
	format   Headers
	outer    *taken // by another middleware before this one

	mu   sync.Mutex
	done bool
}

type takenKey struct{}

// remember lets the handlers inside find what the request was charged.
func (h *handler) remember(w http.ResponseWriter, r *http.Request, d Decision) *http.Request {
	t := &taken{limiter: h.limiter, decision: d, format: h.cfg.Headers}
	if h.cfg.Shadow == nil {
		t.header = w.Header()
	}
	t.outer, _ = r.Context().Value(takenKey{}).(*taken)
	return r.WithContext(context.WithValue(r.Context(), takenKey{}, t))
}

// ChargesFrom returns what the request of ctx was charged, in the form that
// Refund takes, and false outside the middleware. Of several middlewares it is
// the innermost.
func ChargesFrom(ctx context.Context) ([]Charge, bool) {
	t, ok := ctx.Value(takenKey{}).(*taken)
	if !ok {
		return nil, false
	}
	return t.decision.Charges(), true
}

// RefundFrom gives back what the request of ctx was charged, for a request that
// turns out to be free, such as the replay of an answer, also if its client has
// gone meanwhile. Call it before the answer is written: the headers then tell of
// the refund. Further calls do nothing, also after ErrUnavailable, for units
// given back twice would be somebody else's. Outside the middleware it does nothing.
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
	if err := t.limiter.Refund(context.WithoutCancel(ctx), charges...); err != nil {
		return err
	}
	if t.header != nil {
		t.format.write(t.header, t.decision.refunded())
	}
	return nil
}
