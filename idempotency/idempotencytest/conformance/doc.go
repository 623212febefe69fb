// Package conformance is what every implementation of the contracts of
// idempotency/driver and idempotencypgx/driver must pass: [TestStore] for a Store,
// [TestMiddleware] for a store below the HTTP middleware, [TestRecords] and [TestDo]
// for Records.
package conformance
