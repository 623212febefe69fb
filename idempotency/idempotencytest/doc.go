// Package idempotencytest holds in-memory stand-ins for the stores of package
// idempotency, for unit tests and demonstrations without servers.
//
// [New] returns an idempotencypgx.Store whose records are in memory: they belong to the
// transactions of txretrytest and are undone with them. [NewStore] returns the gate
// (what Redis is in production).
//
// [Prove] runs a request of yours on a real Postgres instead, once for each place at
// which it can be interrupted.
//
// Both stores keep the promises of the real ones: the suites in package conformance
// run on all of them.
package idempotencytest
