// Package ratelimit limits how often something is done: requests per user and for the whole service,
// messages per worker fleet. Several limits are decided together, all or nothing: a request that one
// limit denies is charged to none, so a client that is denied cannot use up a quota it shares with
// others.
//
//	user := ratelimit.Limit{Name: "user", Max: 10}       // per minute
//	global := ratelimit.Limit{Name: "global", Max: 1000} // for everybody
//	d, err := limiter.Allow(ctx, ratelimit.Charge{Limit: user, Key: id}, ratelimit.Charge{Limit: global})
//
// The [Limiter] is a [Memory] within one process or a ratelimitredis.Limiter over many; one suite
// holds both to the same answers. [NewMiddleware] puts a limiter in front of HTTP handlers. A [Waiter]
// makes workers wait for their turn, and can take tokens ahead of time.
//
// The head of leased.go describes units taken ahead.
//
// # What is promised
//
// Counting is exact: integers throughout, one decision at a time per counter, by the clock of the
// store alone. A denial changes nothing. Decision.RetryAfter is exact to the millisecond: a request
// before it would be denied, and a request at that time is allowed if nobody else came.
// [Limiter].Refund gives back what was taken and has not lapsed, never more.
//
// # The algorithms
//
// [SlidingWindow], the default, keeps two counters per limit and key: of this window and of the one
// before, aligned to the Unix epoch. The earlier one counts by the share of it that a window ending
// now would cover. It never admits more than Max per aligned window; within some unaligned one a burst
// may reach 2 × Max - 1.
//
// [FixedWindow] keeps this window's counter alone.
//
// [TokenBucket] allows a burst and then a steady rate. It is GCRA, kept as what is missing from the
// bucket rather than as a time, so that rates which are no whole number of milliseconds stay exact.
//
// One decision may hold limits of all three.
//
// # Plans and routes
//
// Charges are made per request, so limits and costs may depend on anything: the route, the plan of the
// user. Limits of one name and window share a counter whatever their Max: a new plan takes effect with
// the next request.
//
// # Order in a service
//
// Authentication comes first, then the rate limit, then idempotency. The replay of an answer should be
// free: call [RefundFrom] where the replay is noticed. It gives back at most ten times what the limits
// admit, since a replay is work too.
//
// # Whom to charge
//
// A user id is taken from what the authentication left ([HeaderKey]), an address from the connection
// or from proxies that are known ([ClientIP]). A request that does not say is refused: requests
// without a key would share a quota. Keys are any text; driver.EncodeKey is the form in which they are
// stored.
//
// # Errors
//
// [ErrNoKey], [ErrUnavailable] and what Decision.Err returns carry their code and HTTP status, and how
// long to wait. The middleware answers with them.
//
// # Cost
//
// A decision of a [Memory] about a known key takes about 0.1 µs and allocates nothing;
// `make bench RUN=ratelimit` measures it beside its peers. That is why a [Decision] is a
// value that works its Limits and Charges out when they are asked for, and why the counters are in a
// hash table of the package's own.
//
// Package ratelimit/driver has what another implementation of Limiter needs.
package ratelimit
