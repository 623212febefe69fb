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
// # Units taken ahead
//
// A [Leased] limiter spares a busy limit most of its round trips. A process takes units ahead in a trip
// that it makes anyway, spends them in memory, and gives back after 100 to 200 ms what is left. Twice as
// many are taken the next time if they were used up sooner, but never more than a hundredth of what the
// limit has left (LeasedConfig.Share): the last hundred units are taken one by one, whoever needs them.
//
// What is spent is never more than the limit admits, by the store's clock and however many processes
// there are, because of two rules:
//
//  1. A unit is spent once, or given back, and not both.
//  2. A unit is spent in the window to which it was charged at the store. A process reckons the store's
//     time from an answer, a hundredth too fast and from when it asked, so it stops milliseconds early.
//
// So the store has charged at any time at least what was spent, and in the same window. A [FixedWindow]
// that admits the one admits the other. So does a [SlidingWindow], since the weight of the previous
// window only falls between the charge and the moment when the unit is spent.
//
// A [TokenBucket] regains tokens in between: units that are spent later would be a burst beyond it. It
// is never leased; the store is asked each time. So it is for a limit whose Max is below Share.
//
// The price is units that nobody can have for a while. Others are denied while a process holds the last
// of a limit, for 200 ms at most, and for a second if they remember the denial. RetryAfter of such a
// denial tells when the limit regains units, not when the others give theirs back. A process that dies
// strands what it holds until that lapses, at the latest with the window after this one: of each limit
// and key at most Max / Share, as much again in a trip under way, and what its calls were charged. So
// does an answer or a refund that is lost. The gauge holdfast.ratelimit.leased tells what is held.
//
// Three things let the units that are held count beyond the limit, once: a store that loses its memory
// or whose clock is set, a Reset, and different Max under one name, window and key.
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
