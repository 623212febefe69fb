package idempotency

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"time"
)

// defaultStoreTimeout bounds one call to the store.
const defaultStoreTimeout = 5 * time.Second

// Do runs fn once per key and returns its value; a repeated call returns the
// value of the first one, with replayed true. The value is kept as JSON.
//
// It returns what fn returns; after an error of fn, or a panic, the key is free
// again. Beside that: ErrKeyInvalid, ErrKeyReused (the fingerprint is another
// one), *InUseError (another call is running), ErrResultUnavailable, errors of
// the store before fn was called, and, together with the value, ErrNotStored.
// A value that JSON cannot hold comes with ErrResultUnavailable too: fn has done
// its work and never does it again.
//
// fn's context carries the claim (ClaimFrom), and is cancelled with cause
// ErrLeaseLost when the key was lost to another run.
func Do[T any](ctx context.Context, store Store, key Key, fp Fingerprint, fn func(context.Context) (T, error)) (value T, replayed bool, err error) {
	var unkept error
	resp, replayed, err := Execute(ctx, store, key, fp, func(ctx context.Context) (resp Response, err error) {
		if value, err = fn(ctx); err != nil {
			return Response{}, err
		}
		resp, unkept = JSON(http.StatusOK, value) // a tombstone if it fails
		return resp, nil
	})
	switch {
	case err != nil:
		return value, replayed, err
	case unkept != nil:
		return value, replayed, fmt.Errorf("%w: %w", ErrResultUnavailable, unkept)
	case replayed:
		if err := json.Unmarshal(resp.Body, &value); err != nil {
			return value, true, fmt.Errorf("idempotency: decode stored value: %w", err)
		}
	}
	return value, replayed, nil
}

// Execute is Do for a fn that makes the Response itself. Every response fn
// returns with a nil error is kept.
func Execute(ctx context.Context, store Store, key Key, fp Fingerprint, fn func(context.Context) (Response, error)) (resp Response, replayed bool, err error) {
	if store == nil || fn == nil {
		return Response{}, false, errors.New("idempotency: Execute needs a store and a function")
	}
	if err := key.Validate(); err != nil {
		return Response{}, false, err
	}
	begun := time.Now()
	claim := NewClaim(key, fp)
	out, err := begin(ctx, store, claim, defaultStoreTimeout)
	if err == nil {
		err = out.refusal(fp)
	}
	if err != nil {
		return Response{}, false, err
	}
	if out.State == Completed {
		return out.Response, true, nil
	}
	r, ctx := startRun(ctx, store, claim, out.Lease, defaultStoreTimeout, begun)
	defer r.end()
	return r.execute(ctx, fn)
}

func (r *run) execute(ctx context.Context, fn func(context.Context) (Response, error)) (resp Response, replayed bool, err error) {
	done := false
	defer func() {
		if !done { // panic or Goexit
			_ = r.close(nil)
		}
	}()
	resp, err = fn(ctx)
	done = true

	if s := r.settled.Load(); s != nil {
		// The record is durable; the store's copy is only the faster way to it.
		_ = r.close(nil)
		return resp, s.replayed, err
	}
	if err != nil {
		_ = r.close(nil) // the lease ends by itself
		return Response{}, false, err
	}
	if err := r.close(&resp); err != nil {
		return resp, false, fmt.Errorf("%w: %w", ErrNotStored, err)
	}
	return resp, false, nil
}

// begin asks the store, for a bounded time.
func begin(ctx context.Context, store Store, claim Claim, timeout time.Duration) (Outcome, error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	out, err := store.Begin(ctx, claim)
	if err != nil {
		return Outcome{}, fmt.Errorf("idempotency: begin: %w", err)
	}
	return out, nil
}
