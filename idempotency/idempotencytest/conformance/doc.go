// Package conformance is what every implementation of the contracts of package
// idempotency must pass: [TestStore] for an idempotency.Store, [TestMiddleware]
// for a store below the HTTP middleware, [TestRecords] and [TestRunner] for
// idempotencypgx.Records.
package conformance
