// Package ratelimit limits how often something is done: requests per user and
// for the whole service, messages per worker fleet. Several limits are decided
// together, all or nothing: a request that one limit denies is charged to none,
// so a client that is denied cannot use up a quota it shares with others.
//
//	user := ratelimit.Limit{Name: "user", Max: 10}       // per minute
//	global := ratelimit.Limit{Name: "global", Max: 1000} // for everybody
//	d, err := limiter.Allow(ctx, ratelimit.Charge{Limit: user, Key: id}, ratelimit.Charge{Limit: global})
//
// The [Limiter] is a [Memory] within one process or a ratelimitredis.Limiter over
// many; the same suite holds both to the same answers. [NewMiddleware] puts one
// in front of HTTP handlers, [NewWaiter] makes workers wait for their turn, and
// [Reserve] takes tokens ahead of time.
//
// # What is promised
//
// Counting is exact: integers throughout, one decision at a time per counter, by
// the clock of the store alone. A denial changes nothing. Decision.RetryAfter is
// exact to the millisecond: sooner would be denied, then would be allowed if
// nobody else came. [Limiter].Refund gives back what was taken and has not
// lapsed, never more.
//
// # The algorithms
//
// [SlidingWindow], the default, keeps two counters per limit and key: of this
// window and of the one before, aligned to the Unix epoch. The earlier one counts
// by the share of it that a window ending now would cover. It never admits more
// than Max per aligned window; within some unaligned one a burst may reach
// 2 × Max - 1.
//
// [TokenBucket] allows a burst and then a steady rate.
//
// # Order in a service
//
// Authentication comes first, then the rate limit, then idempotency. The replay
// of an answer should be free: call [RefundFrom] where the replay is noticed.
package ratelimit
