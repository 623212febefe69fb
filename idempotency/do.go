package idempotency

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/holdfast-go/holdfast/idempotency/driver"
)

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
