// Package ratelimitredis is a ratelimit.Limiter on Redis, for limits that hold
// over many processes.
//
// A decision about any number of limits is one script, so one round trip: it reads all the counters
// and writes only if every limit admits its charge. Only the server's clock counts. The names of the
// counters hold the number of the window, which the client has to declare beforehand: it declares
// those in question, by what it learned of the server's clock from earlier answers, and asks again in
// the rare case that the server finds itself outside of them.
//
// What several callers ask at the same time travels together, decided one after the other in one run
// of the script, which reads and writes each counter once. A denial is remembered for a second, or
// until Redis would admit it; see Config.DenyCache.
//
// # Keys
//
// A limit named user with a key counts in rate_limit:user:{key}:{window}, one without a key in
// rate_limit:global:{window}: an integer, with a TTL of at most two windows and a second. {window} is
// the Unix time divided by the window's length: the number of the minute for a limit per minute. A
// token bucket is kept in rate_limit:user:{key}:b60000, of which the number is the window in
// milliseconds. The braces are placeholders here; driver.EncodeKey says how keys are written.
//
// # Redis Cluster
//
// A script may only touch one slot, so all the counters of a decision need one hash tag. On a cluster
// (and a ring) client there always is one, so that a decision which would not be atomic cannot be
// asked for: the keys are rate_limit:{rl}:user:…, with the braces, on one node. That is exact, at the
// speed of that node. Config.Tag gives limiters that are never asked together different nodes.
//
// While a slot moves from one node to another, the cluster runs no script on it whose keys are not all
// in one place (TRYAGAIN), as if Redis did not answer. What was charged moves along.
//
// # When Redis does not answer
//
// No caller waits longer than Config.Timeout, whatever the client's own timeouts are. After five
// failures in a row Redis is left alone but for one probe a second. What happens to requests
// meanwhile is said by Config.FailOpen and Config.Replicas; such decisions have Fallback set. An
// outage holds a few goroutines, not one per caller. A call that gets no answer has the idle
// connections of the client tested, so that those which a router has forgotten do not each fail
// another call.
//
// # What may be lost
//
// Replication is asynchronous: a failover may forget the charges of the last moments, and a server
// that loses its memory forgets a window. The limiter then admits more than the limit for that long:
// at most the limit once more. A call that runs into Config.Timeout may have been charged, once: the
// limiter then admits less. The client is told not to repeat a script whose connection broke.
//
// If the server's clock is set back, windows count on where they were, and a bucket goes on with what
// it holds. If it is set forward, time has passed.
package ratelimitredis
