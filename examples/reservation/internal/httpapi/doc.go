// Package httpapi serves the shop over HTTP: JSON in and out, every error as
// application/problem+json with a member code.
//
// Each request is checked in one order: route, method, user, rate limit,
// idempotency key, body. A request that fails one check has met none of the
// later ones, so an unknown path costs no unit of the limit, and a bad body
// does not use up the key.
//
// A POST runs its use case through Once: the answer is stored in the transaction
// of the change itself, and a repeated request gets that answer, not a second
// change. Refusals such as SEATS_UNAVAILABLE are answers too and are kept the
// same way; what the client can mend and send again (400, 404, 413, 415, 429)
// and the shop's own faults (503) release the key instead.
package httpapi
