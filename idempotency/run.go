package idempotency

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"
)

// run is the work done under an acquired claim: it renews the lease meanwhile
// and closes the claim in the store exactly once.
type run struct {
	store   Store
	claim   Claim
	lease   time.Duration
	timeout time.Duration // of one call to the store

	base    context.Context // the caller's values, without its cancellation
	cancel  context.CancelCauseFunc
	settled atomic.Pointer[settlement]
	closed  bool // the store was told how it ended

	renewal     *time.Timer
	stopRenew   context.CancelFunc
	renewalDone chan struct{}
	stopOnce    sync.Once
}

// startRun returns the run and the context of the work, which carries the
// claim and is cancelled with cause ErrLeaseLost when the lease is lost. begun
// is the moment before Begin was called: the lease may be as old as that.
func startRun(ctx context.Context, store Store, claim Claim, lease, timeout time.Duration, begun time.Time) (*run, context.Context) {
	r := &run{store: store, claim: claim, lease: lease, timeout: timeout}
	r.base = context.WithoutCancel(ctx)
	renewing, stop := context.WithCancel(r.base)
	r.stopRenew = stop
	r.renewalDone = make(chan struct{})

	claim.run = r
	ctx, r.cancel = context.WithCancelCause(context.WithValue(ctx, claimKey{}, claim))
	r.renewal = time.AfterFunc(time.Until(begun.Add(lease/3)), func() { r.renew(renewing, expiry(begun, lease)) })
	return r, ctx
}

// expiry is when a lease must have run out that began after begun. A Begin that
// took long proves nothing about the lease, which may have begun at the end of
// it: the store is given the time to answer.
func expiry(begun time.Time, lease time.Duration) time.Time {
	return begun.Add(max(lease, time.Since(begun)+lease/3))
}

// renew extends the lease every third of it, until renewing ends. A store that does
// not answer is asked again until the lease must have run out.
func (r *run) renew(renewing context.Context, expires time.Time) {
	defer close(r.renewalDone)
	for {
		asked := time.Now()
		ctx, cancel := context.WithTimeout(renewing, min(r.timeout, time.Until(expires)))
		err := r.store.Extend(ctx, r.claim)
		cancel()

		pause := r.lease / 3
		switch {
		case renewing.Err() != nil:
			return
		case err == nil:
			expires = asked.Add(r.lease)
		case errors.Is(err, ErrLeaseLost) || !time.Now().Before(expires):
			r.cancel(ErrLeaseLost)
			return
		default:
			pause = min(r.lease/10, time.Until(expires))
		}
		select {
		case <-renewing.Done():
			return
		case <-time.After(pause):
		}
	}
}

// stopRenewal returns when no renewal is running any more. It may be called
// more than once.
func (r *run) stopRenewal() {
	r.stopOnce.Do(func() {
		r.stopRenew()
		if !r.renewal.Stop() {
			<-r.renewalDone
		}
	})
}

// end frees what the run holds in this process.
func (r *run) end() {
	r.stopRenewal()
	r.cancel(nil)
}

// close ends the claim in the store, even when the caller is gone: with the
// settled record if there is one, else with resp, and by a release if that is
// nil. Only the first call does anything.
func (r *run) close(resp *Response) error {
	if r.closed {
		return nil
	}
	r.closed = true
	r.stopRenewal()
	ctx, cancel := context.WithTimeout(r.base, r.timeout)
	defer cancel()

	if s := r.settled.Load(); s != nil {
		claim := r.claim
		claim.Fingerprint = s.record.Fingerprint
		return r.store.Complete(ctx, claim, s.record.Response)
	}
	if resp != nil {
		return r.store.Complete(ctx, r.claim, *resp)
	}
	return r.store.Release(ctx, r.claim)
}
