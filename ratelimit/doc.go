// Package ratelimit limits how often something is done: requests per user and for the whole service, or
// messages of all workers together. Several limits are decided together, all or nothing. A request that
// one limit denies is charged to none of them, so a denied client cannot use up a quota it shares with
// others.
//
//	user := ratelimit.Limit{Name: "user", Max: 10}       // per minute
//	global := ratelimit.Limit{Name: "global", Max: 1000} // for everybody
//	d, err := limiter.Allow(ctx, ratelimit.Charge{Limit: user, Key: id}, ratelimit.Charge{Limit: global})
//
// The [Limiter] is a [Memory] within one process, or a ratelimitredis.Limiter for many processes. One
// test suite requires the same answers of both. [NewMiddleware] puts a limiter in front of HTTP
// handlers. A [Waiter] makes workers wait for their turn, and can reserve tokens ahead of time.
//
// The comment at the top of leased.go describes [Leased].
//
// # Guarantees
//
// Counting is exact: all numbers are integers, each counter has one decision at a time, and only the
// store's clock counts. A denial changes nothing. Decision.RetryAfter is exact to the millisecond: a
// request before it would be denied, and a request at that time is allowed if no other request came.
// [Limiter].Refund returns units that were charged and have not lapsed, never more.
//
// # The algorithms
//
// [SlidingWindow], the default, keeps two counters per limit and key: one for the current window and
// one for the previous window, aligned to the Unix epoch. The previous counter is weighted by the share
// of its window that a window ending now would cover. SlidingWindow never admits more than Max per
// aligned window. In an unaligned window a burst may reach 2 × Max - 1.
//
// [FixedWindow] keeps only the counter of the current window.
//
// [TokenBucket] allows a burst and then a steady rate. It is GCRA, but it stores the amount missing
// from a full bucket instead of a time, so that rates without a whole number of milliseconds stay
// exact.
//
// One decision may use limits of all three algorithms.
//
// # Plans and routes
//
// Charges are made per request, so limits and costs may depend on anything, such as the route or the
// user's plan. Limits with the same name and window share a counter, whatever their Max: a new plan
// takes effect with the next request.
//
// # Order in a service
//
// Authentication comes first, then the rate limit, then idempotency. The replay of an answer should be
// free: call [RefundFrom] when you detect the replay. It refunds at most ten times as much as the
// limits admit, because a replay costs work too.
//
// # Keys
//
// Take a user id from a header that the authentication sets ([HeaderKey]), and an address from the
// connection or from known proxies ([ClientIP]). A request without a key is rejected, because requests
// without a key would share a quota. A key may be any text; driver.EncodeKey describes its stored form.
//
// # Errors
//
// [ErrNoKey], [ErrUnavailable] and the error of Decision.Err have a code, an HTTP status and, if
// waiting helps, a RetryAfter. The middleware answers with them.
//
// # Cost
//
// A decision of a [Memory] about a known key takes about 0.1 µs and allocates nothing; `make bench
// RUN=ratelimit` compares it with similar packages. For this reason a [Decision] is a value that
// computes its Limits and Charges only on request, and the package has its own hash table for counters.
//
// Package ratelimit/driver has the types for other implementations of Limiter.
package ratelimit
