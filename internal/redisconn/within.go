package redisconn

import (
	"context"
	"fmt"
	"time"
)

// grace is how long a client may take to notice that its context has ended.
const grace = time.Second

// Within bounds a call of a client that may not mind the end of its context: a second after that, or
// after the timeout, the call is left behind, and ends by the client's own timeouts. Nothing that
// the call writes to may be looked at then.
func Within[T any](ctx context.Context, timeout time.Duration, call func(context.Context) (T, error)) (T, error) {
	type result struct {
		value T
		err   error
	}
	bounded, cancel := context.WithTimeout(ctx, timeout)
	results := make(chan result, 1)
	go func() {
		defer cancel()
		value, err := call(bounded)
		results <- result{value, err}
	}()
	select {
	case r := <-results:
		return r.value, r.err
	case <-bounded.Done():
	}
	select {
	case r := <-results:
		return r.value, r.err
	case <-time.After(grace):
		var none T
		return none, fmt.Errorf("no answer within %v: %w", timeout, bounded.Err())
	}
}
