package ratelimit_test

import (
	"errors"
	"fmt"
	"net/http"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/ratelimit"
)

// coded is what an error that reaches a client has.
type coded interface {
	error
	Code() string
	HTTPStatus() int
	RetryAfter() time.Duration
}

// Every error that reaches a client carries its code and status, also when it is wrapped.
func TestErrorsWithACode(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		err        error
		code       string
		status     int
		retryAfter time.Duration
	}{
		{ratelimit.ErrUnavailable, "RATE_LIMIT_UNAVAILABLE", http.StatusServiceUnavailable, time.Second},
		{ratelimit.ErrNoKey, "RATE_LIMIT_KEY_REQUIRED", http.StatusBadRequest, 0},
		{ratelimit.Decision{Denied: "user", RetryAfter: 1500 * time.Millisecond}.Err(), "RATE_LIMITED", http.StatusTooManyRequests, 1500 * time.Millisecond},
		{ratelimit.Decision{Denied: "user", Never: true}.Err(), "RATE_LIMITED", http.StatusTooManyRequests, 0},
	} {
		got, ok := errors.AsType[coded](fmt.Errorf("wrapped: %w", tc.err))
		if !ok {
			t.Errorf("%v has no code", tc.err)
			continue
		}
		if got.Code() != tc.code || got.HTTPStatus() != tc.status || got.RetryAfter() != tc.retryAfter {
			t.Errorf("%v: %s, %d, %v, want %s, %d, %v", tc.err, got.Code(), got.HTTPStatus(), got.RetryAfter(), tc.code, tc.status, tc.retryAfter)
		}
	}
	if err := (ratelimit.Decision{Allowed: true}).Err(); err != nil {
		t.Errorf("an allowed decision is the error %v", err)
	}
	if err := (ratelimit.Decision{Denied: "user", Never: true}).Err(); !errors.Is(err, ratelimit.ErrNever) {
		t.Errorf("a cost above the limit is the error %v", err)
	}
	if err := (ratelimit.Decision{Denied: "user", RetryAfter: 1}).Err(); errors.Is(err, ratelimit.ErrNever) {
		t.Errorf("a denial is the error %v", err)
	}
	for _, err := range []error{ratelimit.ErrInvalid, ratelimit.ErrNever, ratelimit.ErrWaitTooLong} {
		if got, ok := errors.AsType[coded](err); ok {
			t.Errorf("%v has the code %s", err, got.Code())
		}
	}
}
