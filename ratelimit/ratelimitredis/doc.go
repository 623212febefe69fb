// Package ratelimitredis is a ratelimit.Limiter on Redis, for limits that hold
// over many processes.
//
// A decision about any number of limits is one script, so one round trip: it
// reads all the counters and writes only if every limit admits its charge. Only
// the server's clock counts. The names of the counters hold the number of the
// window, which the client has to declare beforehand: it declares three in a row,
// by what it learned of the server's clock from earlier answers, and asks again
// in the rare case that the server finds itself outside of them.
//
// # Keys
//
// A limit named user with a key counts in rate_limit:user:{key}:{window}, one
// without a key in rate_limit:global:{window}: an integer, with a TTL of at most
// two windows and a second. {window} is the Unix time divided by the window's length: the
// number of the minute for a limit per minute. A token bucket is kept in
// rate_limit:user:{key}:b. The braces are placeholders here; keys are encoded by
// ratelimit.EncodeKey.
//
// # Redis Cluster
//
// A script may only touch one slot, so all the counters of a decision need one
// hash tag. On a cluster (and a ring) client the keys therefore are
// rate_limit:{rl}:user:…, with the braces, and all live on one node: exact, at
// the speed of one node. Config.Tag gives limiters that are never asked together
// different nodes.
//
// # What may be lost
//
// Replication is asynchronous: a failover may forget the charges of the last
// moments, and a server that loses its memory forgets a window. The limiter then
// admits more than the limit for that long. A call that runs into
// Config.Timeout may have been charged, and one that the client repeats after a
// lost connection may be charged twice: the limiter then admits less.
package ratelimitredis
