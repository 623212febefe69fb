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

// run is the work done under an acquired claim. It renews the lease during the work and closes the claim in the store
// exactly once.
type run struct {
	store    driver.Store
	claim    driver.Claim
	keep     func(status int) bool // which statuses are final
	maxBytes int                   // limit of a kept response
	lease    time.Duration
	onLost   func(*run) // optional
	docs     string     // the page that problems link to; empty: this project's page

	work    lazyContext // for the work
	first   lazyContext // for Begin
	last    lazyContext // for Complete or Release
	settled atomic.Pointer[settlement]
	effect  atomic.Bool
	refused atomic.Bool // the work could not reach the store
	closed  bool        // the end of the run was sent to the store

	begun   time.Time // when Begin was called
	expires time.Time // when the lease has certainly run out
	renewal *time.Timer

	mu        sync.Mutex
	stopped   bool
	stopRenew context.CancelFunc // nil until a renewal runs
	renewed   chan struct{}      // closed when the renewal has ended
}

// lazyContext is a context with its own cancellation. It creates a context of the standard library only when somebody
// waits for it. It lives inside its run, because three contexts made in advance are a dozen allocations, more than
// the rest of a run costs.
type lazyContext struct {
	parent   context.Context
	detached bool      // ignores the parent's cancellation and keeps its values
	deadline time.Time // zero: the parent's deadline, or none if detached
	holder   *run      // the run that driver.ClaimFrom finds; nil: the parent's, and with a deadline no cause is kept

	mu     sync.Mutex
	inner  context.Context // nil until somebody waits
	cancel context.CancelCauseFunc
	ended  bool
}

// storeTimeout bounds one call to the store.
const storeTimeout = 5 * time.Second

// begin calls the store's Begin at time now, for at most storeTimeout. call becomes the context of the call.
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

// abandon frees a claim that a Begin without an answer may have made. A server that hangs may execute the Begin
// later, after the caller has given up. The release is therefore repeated until it is answered. If it never is, the
// lease runs out.
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

// start returns the context of the work, which carries the claim and is cancelled with cause ErrLeaseLost when the
// lease is lost. It ends with ctx. With outlasts, only the deadline of ctx ends it.
//
// The lease began at some time between the call and the answer of Begin. A Begin that took long does not show that
// the lease is over, so the store gets time to answer a renewal.
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

// renew extends the lease after each third of it, until stopRenewal. If a store does not answer, renew tries again
// until the lease has certainly run out.
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

// extend returns the wait until the next renewal; 0 means no further renewal.
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

// stopRenewal stops the renewal and waits until it has ended. It may be called more than once.
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

// Documentation is the method that inctx.Documentation calls.
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

// fallBack makes the store's fallback decide from now on, after a failed Begin. It returns false if there is no
// fallback, or if the fallback must not decide.
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

// end frees the resources that the run holds in this process.
func (r *run) end() {
	r.stopRenewal()
	r.work.end(nil)
}

// unkept returns the record of a run without a response to keep: nil frees the key.
func (r *run) unkept() *driver.Response {
	if r.effect.Load() {
		return &driver.Response{}
	}
	return nil
}

// close ends the claim in the store, even when the caller has disconnected. It stores the settled record if there is
// one, else resp. If resp is nil, it releases the key. Only the first call has an effect.
func (r *run) close(resp *driver.Response) error {
	if r.closed {
		return nil
	}
	r.closed = true
	r.stopRenewal()
	r.last = lazyContext{parent: r.work.parent, detached: true, deadline: time.Now().Add(storeTimeout)}
	defer r.last.end(nil)

	if s := r.settled.Load(); s != nil {
		if r.lease == 0 { // the record was settled in this store
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

// The pauses of complete. Each is twice the previous one, 0.63 s in all.
const (
	firstPause = 10 * time.Millisecond
	lastPause  = 320 * time.Millisecond
)

// complete retries for a while. Without the record the key runs again when the lease ends, and the error may only
// come from a connection broken by a restart.
func (r *run) complete(resp driver.Response) error {
	claim, _ := driver.ClaimFrom(&r.work) // a store may settle another run's record with it
	for pause := firstPause; ; pause *= 2 {
		err := r.store.Complete(&r.last, claim, resp)
		if err == nil || errors.Is(err, ErrLeaseLost) || pause > lastPause || runloop.Sleep(&r.last, pause) != nil {
			return err
		}
	}
}

// MarkEffect records that the work under ctx has had, or may have had, an effect that cannot be undone. Call it
// before a payment is sent, for example. From then on the key is never free again: every response is kept, whatever
// its status. After an error, a panic or a response that cannot be kept, later requests get ErrResultUnavailable.
// Without a claim in ctx it does nothing.
//
// The mark is in memory only. If the process dies, the lease runs out and the key runs again. Give the effect its own
// key, see ChildKey.
func MarkEffect(ctx context.Context) {
	if claim, ok := driver.ClaimFrom(ctx); ok {
		claim.MarkEffect()
	}
}

// ChildKey returns the key for a part of the work under ctx, such as a call to a payment provider. It is the same in
// every run for the same name and key, and nobody can guess it without the key. Without a claim in ctx it returns
// ErrNoClaim.
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

// end cancels the context. Only the first cause counts; nil means a normal end.
func (c *lazyContext) end(cause error) {
	c.mu.Lock()
	if cause != nil {
		c.open() // an inner context keeps the cause
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

// Do runs fn once per key and returns its value. A repeated call returns the value of the first one, with replayed
// true; with an error replayed is false. The value is kept as JSON; a Response is kept unchanged. request describes
// the call: the same key with a different request is ErrKeyReused. With a nil request only the key counts.
//
// Do returns the error of fn. After an error of fn, or a panic, the key is free again, unless MarkEffect was called;
// return a final rejection as a value of T. Other errors: ErrKeyInvalid, ErrKeyReused, ErrKeyInUse (another call is
// running), ErrResultUnavailable, ErrStoreUnavailable (fn was not called), and, together with the value,
// ErrNotStored. A value that JSON cannot encode also gives ErrResultUnavailable: fn has done its work and never runs
// again.
//
// fn's context is the one for ChildKey and MarkEffect. It is cancelled with cause ErrLeaseLost when the lease is
// lost.
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
	case unkept != nil && resp.Unavailable():
		return value, replayed, fmt.Errorf("%w: %w", ErrResultUnavailable, unkept)
	case replayed:
		var first T // fn may have run, too
		err = decode(resp, &first)
		return first, err == nil, err
	}
	return value, false, nil
}

func encode(value any) (driver.Response, error) {
	if resp, ok := value.(Response); ok {
		return driver.Response(resp).Clone(), nil // the caller may change its value
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

// execute is Do for an fn that returns the Response itself.
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
		// The record is durable. The store's copy only makes replays faster.
		_ = r.close(nil)
		return resp, s.replayed && err == nil, err
	}
	kept := &resp
	if err != nil {
		resp, kept = driver.Response{}, r.unkept()
	}
	lost := r.close(kept)
	if s := r.settled.Load(); s != nil && err == nil { // another run has completed the key in the meantime
		err = refusal(s.record, r.claim.Fingerprint)
		return s.record.Response, err == nil, err
	}
	if lost != nil && kept != nil { // a failed release ends with the lease
		err = errors.Join(err, fmt.Errorf("%w: %w", ErrNotStored, lost))
	}
	return resp, false, err
}
