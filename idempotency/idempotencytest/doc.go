// Package idempotencytest holds in-memory stand-ins for the stores of package
// idempotency, for unit tests and demonstrations without servers.
//
// [Store] is the gate (what Redis is in production) and meets
// idempotency.Store. [Records] is the table of records that idempotencypgx
// keeps in the business database; its changes belong to the transactions of
// txretrytest, and are undone with them.
//
// Both keep the promises of the real ones: the suites in package conformance
// run on all of them.
package idempotencytest
