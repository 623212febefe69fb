package idempotency

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/idempotency/internal/inctx"
	"github.com/holdfast-go/holdfast/idempotency/internal/keys"
	"github.com/holdfast-go/holdfast/internal/runloop"
)

// run is the work done under an acquired claim: it renews the lease meanwhile
// and closes the claim in the store exactly once.
type run struct {
	store    driver.Store
	claim    driver.Claim
	keep     func(status int) bool // which statuses are final
	maxBytes int                   // of a kept response
	lease    time.Duration
	onLost   func(*run) // optional
	docs     string     // what problems link to; empty: that of this project

	work    lazyContext // of the work
	first   lazyContext // of Begin
	last    lazyContext // of Complete or Release
	settled atomic.Pointer[settlement]
	effect  atomic.Bool
	refused atomic.Bool // the work could not ask the store
	closed  bool        // the store was told how it ended

	begun   time.Time // when Begin was asked
	expires time.Time // when the lease must have run out
	renewal *time.Timer

	mu        sync.Mutex
	stopped   bool
	stopRenew context.CancelFunc // nil until a renewal is due
	renewed   chan struct{}      // closed when no renewal runs any more
}

// lazyContext is a context with a cancellation of its own, behind which a
// context of the standard library stands only once somebody waits for it. It
// lives inside the run that needs it: three contexts made in advance are a dozen
// allocations, more than all else that a run costs.
type lazyContext struct {
	parent   context.Context
	detached bool      // of the parent's cancellation; only its values count
	deadline time.Time // zero: that of the parent, unless detached
	holder   *run      // whom driver.ClaimFrom finds; nil: whom it finds in the parent, and no cause is remembered beside a deadline

	mu     sync.Mutex
	inner  context.Context // nil until somebody waits
	cancel context.CancelCauseFunc
	ended  bool
}

// storeTimeout bounds one call to the store.
const storeTimeout = 5 * time.Second

// begin asks the store now, for a bounded time. call is the context to be
// bounded.
func (r *run) begin(call *lazyContext, now time.Time) (driver.BeginResult, error) {
	r.begun = now
	call.deadline = now.Add(storeTimeout)
	out, err := r.store.Begin(call, r.claim)
	if err != nil && (call.Err() != nil || errors.Is(err, context.DeadlineExceeded)) {
		go abandon(call.parent, r.store, r.claim)
	}
	call.end(nil)
	if err != nil {
		return driver.BeginResult{}, fmt.Errorf("%w: %w", ErrStoreUnavailable, err)
	}
	r.lease = out.Lease
	return out, nil
}

const (
	abandonFor   = time.Minute
	abandonPause = time.Second
)

// abandon frees what a Begin without an answer may have taken. A server that hangs
// carries it out when it goes on, although the caller has given up. The release is
// therefore repeated until it is answered. If it never is, the lease runs out.
func abandon(ctx context.Context, store driver.Store, claim driver.Claim) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), abandonFor)
	defer cancel()
	for {
		call, done := context.WithTimeout(ctx, storeTimeout)
		err := store.Release(call, claim)
		done()
		if err == nil || errors.Is(err, ErrLeaseLost) || runloop.Sleep(ctx, abandonPause) != nil {
			return
		}
	}
}

// start returns the context of the work, which carries the claim and is
// cancelled with cause ErrLeaseLost when the lease is lost. It ends with ctx, or, if it
// outlasts the caller, with the deadline of ctx alone.
//
// The lease began somewhere between the asking and the answer of Begin. A Begin
// that took long proves nothing about it: the store is given the time to answer.
func (r *run) start(ctx context.Context, outlasts bool) context.Context {
	r.work = lazyContext{parent: ctx, holder: r, detached: outlasts}
	if outlasts {
		r.work.deadline, _ = ctx.Deadline()
	}
	if r.lease > 0 {
		took := time.Since(r.begun)
		r.expires = r.begun.Add(max(r.lease, took+r.lease/3))
		r.renewal = time.AfterFunc(r.lease/3-took, r.renew)
	}
	return &r.work
}

// renew extends the lease every third of it, until it is stopped. A store that
// does not answer is asked again until the lease must have run out.
func (r *run) renew() {
	r.mu.Lock()
	if r.stopped {
		r.mu.Unlock()
		return
	}
	ctx, stop := context.WithCancel(context.WithoutCancel(r.work.parent))
	defer stop()
	r.stopRenew, r.renewed = stop, make(chan struct{})
	defer close(r.renewed)
	r.mu.Unlock()

	for pause := r.extend(ctx); pause > 0; pause = r.extend(ctx) {
		select {
		case <-ctx.Done():
			return
		case <-time.After(pause):
		}
	}
}

// extend returns how long to wait before the next time; 0: there is none.
func (r *run) extend(ctx context.Context) time.Duration {
	asked := time.Now()
	call, cancel := context.WithTimeout(ctx, min(storeTimeout, time.Until(r.expires)))
	err := r.store.Extend(call, r.claim)
	cancel()
	switch {
	case ctx.Err() != nil:
		return 0
	case err == nil:
		r.expires = asked.Add(r.lease)
		return r.lease / 3
	case errors.Is(err, ErrLeaseLost) || !time.Now().Before(r.expires):
		r.work.end(ErrLeaseLost)
		if r.onLost != nil {
			r.onLost(r)
		}
		return 0
	}
	return max(1, min(r.lease/10, time.Until(r.expires)))
}

// stopRenewal returns when no renewal is running any more. It may be called
// more than once.
func (r *run) stopRenewal() {
	if r.renewal == nil {
		return
	}
	r.renewal.Stop()
	r.mu.Lock()
	r.stopped = true
	stop, renewed := r.stopRenew, r.renewed
	r.mu.Unlock()
	if stop != nil {
		stop()
		<-renewed
	}
}

type settlement struct {
	record   driver.BeginResult
	replayed bool
}

// Documentation is for inctx.Documentation.
func (r *run) Documentation() string { return r.docs }

// Claim implements driver.Holder.
func (r *run) Claim() driver.Claim { return r.claim }

// Settle implements driver.Holder.
func (r *run) Settle(record driver.BeginResult, replayed bool) {
	r.settled.Store(&settlement{record: record, replayed: replayed})
	r.stopRenewal()
}

// MarkEffect implements driver.Holder.
func (r *run) MarkEffect() { r.effect.Store(true) }

// MarkUnavailable implements driver.Holder.
func (r *run) MarkUnavailable() { r.refused.Store(true) }

// Keeps implements driver.Holder.
func (r *run) Keeps(resp driver.Response) (kept driver.Response, final bool) {
	if resp.Size() > r.maxBytes {
		kept = driver.Response{}
	} else {
		kept = resp
	}
	return kept, r.keep(resp.Status)
}

// fallBack has the store's fallback decide from now on, after a Begin that has failed. It is false if
// there is none, or if it is not the fallback's to decide.
func (r *run) fallBack(failure error) bool {
	tiered, ok := r.store.(driver.Tiered)
	if !ok || errors.Is(failure, driver.ErrForeignRecord) {
		return false
	}
	behind := tiered.Fallback()
	if behind == nil {
		return false
	}
	r.store = behind
	return true
}

// end frees what the run holds in this process.
func (r *run) end() {
	r.stopRenewal()
	r.work.end(nil)
}

// unkept ends a run that has no response to keep: nil frees the key.
func (r *run) unkept() *driver.Response {
	if r.effect.Load() {
		return &driver.Response{}
	}
	return nil
}

// close ends the claim in the store, even when the caller is gone: with the
// settled record if there is one, else with resp, and by a release if that is
// nil. Only the first call does anything.
func (r *run) close(resp *driver.Response) error {
	if r.closed {
		return nil
	}
	r.closed = true
	r.stopRenewal()
	r.last = lazyContext{parent: r.work.parent, detached: true, deadline: time.Now().Add(storeTimeout)}
	defer r.last.end(nil)

	if s := r.settled.Load(); s != nil {
		if r.lease == 0 { // the store is where it was settled
			return nil
		}
		claim := r.claim
		claim.Fingerprint = s.record.Fingerprint
		return r.store.Complete(&r.last, claim, s.record.Response.Clone())
	}
	if resp != nil {
		return r.complete(*resp)
	}
	return r.store.Release(&r.last, r.claim)
}

// The pauses of complete, doubled each time: 0.6 s in all.
const (
	firstPause = 10 * time.Millisecond
	lastPause  = 320 * time.Millisecond
)

// complete tries again, for a while: what is not stored runs again when the lease
// ends, and the error may be that of a connection which a restart has broken.
func (r *run) complete(resp driver.Response) error {
	claim, _ := driver.ClaimFrom(&r.work) // with which a store may settle what another run has done
	for pause := firstPause; ; pause *= 2 {
		err := r.store.Complete(&r.last, claim, resp)
		if err == nil || errors.Is(err, ErrLeaseLost) || pause > lastPause || runloop.Sleep(&r.last, pause) != nil {
			return err
		}
	}
}

// MarkEffect says that the work under ctx has had, or may have had, an effect
// that nobody takes back: call it before a payment is sent. From then on the key
// is never free again: a response that would not be kept is kept, and after an
// error, a panic or a response that cannot be kept there is a tombstone. Without
// a claim in ctx it does nothing.
//
// The mark is in memory only. If the process dies, the lease runs out and the
// key runs again: give the effect a key of its own, see ChildKey.
func MarkEffect(ctx context.Context) {
	if claim, ok := driver.ClaimFrom(ctx); ok {
		claim.MarkEffect()
	}
}

// ChildKey returns the key for a part of the work under ctx, such as a call to
// a payment provider: always the same one for the same name below the same key,
// whichever run asks for it, and nothing that could be known without the key.
// Without a claim in ctx it is ErrNoClaim.
func ChildKey(ctx context.Context, name string) (Key, error) {
	claim, ok := driver.ClaimFrom(ctx)
	if !ok {
		return "", ErrNoClaim
	}
	return Key(keys.Child(string(claim.Key), name)), nil
}

func (c *lazyContext) Deadline() (time.Time, bool) {
	if inner := c.opened(); inner != nil {
		return inner.Deadline()
	}
	if c.detached {
		return c.deadline, !c.deadline.IsZero()
	}
	d, ok := c.parent.Deadline()
	if !c.deadline.IsZero() && (!ok || c.deadline.Before(d)) {
		return c.deadline, true
	}
	return d, ok
}

func (c *lazyContext) Done() <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.open()
	return c.inner.Done()
}

func (c *lazyContext) Err() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.inner != nil:
		return c.inner.Err()
	case c.ended:
		return context.Canceled
	case !c.detached && c.parent.Err() != nil:
		return c.parent.Err()
	case !c.deadline.IsZero() && !time.Now().Before(c.deadline):
		return context.DeadlineExceeded
	}
	return nil
}

func (c *lazyContext) Value(key any) any {
	if c.holder != nil && key == (inctx.Holder{}) {
		return c.holder
	}
	if inner := c.opened(); inner != nil {
		return inner.Value(key)
	}
	if c.detached {
		return context.WithoutCancel(c.parent).Value(key)
	}
	return c.parent.Value(key)
}

// end cancels the context. Only the first cause counts; nil is that of a normal
// end.
func (c *lazyContext) end(cause error) {
	c.mu.Lock()
	if cause != nil {
		c.open() // it has to be remembered
	}
	c.ended = true
	cancel := c.cancel
	c.mu.Unlock()
	if cancel != nil {
		cancel(cause)
	}
}

func (c *lazyContext) opened() context.Context {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.inner
}

func (c *lazyContext) open() {
	if c.inner != nil {
		return
	}
	parent := c.parent
	if c.detached {
		parent = context.WithoutCancel(parent)
	}
	switch {
	case c.deadline.IsZero():
		c.inner, c.cancel = context.WithCancelCause(parent)
	case c.holder == nil:
		ctx, stop := context.WithDeadline(parent, c.deadline)
		c.inner, c.cancel = ctx, func(error) { stop() }
	default:
		timed, stop := context.WithDeadline(parent, c.deadline)
		ctx, cancel := context.WithCancelCause(timed)
		c.inner, c.cancel = ctx, func(cause error) { cancel(cause); stop() }
	}
	if c.ended {
		c.cancel(nil)
	}
}

// Do runs fn once per key and returns its value; a repeated call returns the
// value of the first one, with replayed true; with an error replayed is false. The value is kept as JSON; a
// Response is kept as it is. request says what the call asks for: the same key
// with other words is ErrKeyReused. nil: the key alone.
//
// It returns what fn returns. After an error of fn, or a panic, the key is free
// again, unless MarkEffect was called; a refusal that is final belongs into T.
// Beside that: ErrKeyInvalid, ErrKeyReused, ErrKeyInUse (another call is running),
// ErrResultUnavailable, ErrStoreUnavailable (fn was not called), and, together with
// the value, ErrNotStored. A value that JSON cannot hold comes with
// ErrResultUnavailable too: fn has done its work and never does it again.
//
// fn's context is that of ChildKey and MarkEffect, and is cancelled with cause
// ErrLeaseLost when the key was lost to another run.
func Do[T any](ctx context.Context, store driver.Store, key Key, request []string, fn func(ctx context.Context) (T, error)) (value T, replayed bool, err error) {
	if store == nil || fn == nil {
		return value, false, errors.New("idempotency: Do needs a store and a function")
	}
	var unkept error
	resp, replayed, err := execute(ctx, store, key, request, func(ctx context.Context) (resp driver.Response, err error) {
		if value, err = fn(ctx); err != nil {
			return driver.Response{}, err
		}
		resp, unkept = encode(value) // a tombstone if it fails
		return resp, nil
	})
	switch {
	case err != nil:
		return value, replayed, err
	case unkept != nil:
		return value, replayed, fmt.Errorf("%w: %w", ErrResultUnavailable, unkept)
	case replayed:
		err = decode(resp, &value)
	}
	return value, replayed && err == nil, err
}

func encode(value any) (driver.Response, error) {
	if resp, ok := value.(Response); ok {
		return driver.Response(resp).Clone(), nil // the caller may change its own
	}
	resp, err := JSON(http.StatusOK, value)
	return driver.Response(resp), err
}

func decode(resp driver.Response, value any) error {
	if place, ok := value.(*Response); ok {
		*place = Response(resp)
		return nil
	}
	if err := json.Unmarshal(resp.Body, value); err != nil {
		return fmt.Errorf("idempotency: decode stored value: %w", err)
	}
	return nil
}

// execute is Do for a fn that makes the Response itself.
func execute(ctx context.Context, store driver.Store, key Key, request []string, fn func(context.Context) (driver.Response, error)) (resp driver.Response, replayed bool, err error) {
	if err := key.Validate(); err != nil {
		return driver.Response{}, false, err
	}
	claim := driver.NewClaim(driver.Key(key), driver.FingerprintOf(request...))
	r := &run{store: store, claim: claim, keep: defaultKeep, maxBytes: defaultMaxBytes}
	r.first = lazyContext{parent: ctx}
	out, err := r.begin(&r.first, time.Now())
	if err != nil && r.fallBack(err) {
		out, err = r.begin(&lazyContext{parent: ctx}, time.Now())
	}
	if err == nil {
		err = refusal(out, claim.Fingerprint)
	}
	if err != nil {
		return driver.Response{}, false, err
	}
	if out.State == driver.Completed {
		return out.Response, true, nil
	}
	ctx = r.start(ctx, false)
	defer r.end()
	return r.execute(ctx, fn)
}

func (r *run) execute(ctx context.Context, fn func(context.Context) (driver.Response, error)) (resp driver.Response, replayed bool, err error) {
	done := false
	defer func() {
		if !done { // panic or Goexit
			_ = r.close(r.unkept())
		}
	}()
	resp, err = fn(ctx)
	done = true

	if s := r.settled.Load(); s != nil {
		// The record is durable; the store's copy is only the faster way to it.
		_ = r.close(nil)
		return resp, s.replayed && err == nil, err
	}
	kept := &resp
	if err != nil {
		resp, kept = driver.Response{}, r.unkept()
	}
	if lost := r.close(kept); lost != nil && kept != nil { // what was not released ends with its lease
		err = errors.Join(err, fmt.Errorf("%w: %w", ErrNotStored, lost))
	}
	return resp, false, err
}
