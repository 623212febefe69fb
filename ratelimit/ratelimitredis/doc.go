// Package ratelimitredis is a ratelimit.Limiter on Redis, for limits shared by many processes.
//
// A decision about any number of limits is one script, so one round trip. The script reads all counters
// and writes only if every limit admits its charge. Only the server's clock counts. The names of the
// counters contain the number of the window, and the client must declare them beforehand. It declares
// the possible windows, based on the server's clock in earlier answers. In the rare case that the
// server is in another window, the client calls again.
//
// Concurrent calls share a round trip. One run of the script decides them one after the other, and
// reads and writes each counter once. A denial is remembered for a second, or until Redis would admit
// the charge; see Config.DenyCache.
//
// # Keys
//
// A limit named user with a key counts in rate_limit:user:{key}:{window}, a limit without a key in
// rate_limit:global:{window}: an integer, with a TTL of at most two windows and a second. {window} is
// the Unix time divided by the window's length: the number of the minute for a limit per minute. A
// token bucket is stored in rate_limit:user:{key}:b60000, where the number is the window in
// milliseconds. The braces mark variable parts here; driver.EncodeKey describes the stored form of a
// key.
//
// # Redis Cluster
//
// A script may use only one slot, so all counters of a decision need the same hash tag. A cluster or
// ring client always has a tag, so that every decision is atomic: the keys are rate_limit:{rl}:user:…,
// with literal braces, on one node. That is exact, with the throughput of one node. Give limiters that
// are never used together different nodes by Config.Tag.
//
// While a slot moves from one node to another, the cluster rejects scripts whose keys are not all in
// one place (TRYAGAIN). This counts as an outage. The counters move with the slot.
//
// # When Redis does not answer
//
// No caller waits longer than Config.Timeout, whatever the client's own timeouts are. After five
// failures in a row Redis gets only one probe a second. Meanwhile Config.FailOpen and Config.Replicas
// decide about requests; such decisions have Fallback set. An outage uses a few goroutines, not one per
// caller. After a call without an answer the idle connections of the client are tested, so that
// connections forgotten by a router do not each fail another call.
//
// # Possible errors in counting
//
// Replication is asynchronous: a failover may lose the charges of the last moments, and a server that
// loses its memory loses a window. The limiter then admits more than the limit for that time: at most
// the limit once more. A call that exceeds Config.Timeout may have been charged once: the limiter then
// admits less. A script whose connection broke is not repeated.
//
// If the server's clock is set back, windows count on from their state, and a bucket keeps its tokens.
// If the clock is set forward, the skipped time counts as passed.
package ratelimitredis
