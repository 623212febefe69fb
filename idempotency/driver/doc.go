// Package driver is what a store of package idempotency needs, and its users do not:
// the contract [Store], the [Claim] of one run, and what is kept of it. The suite in
// idempotencytest/conformance says what else a store must do.
//
// Whoever stores an answer in another place than the store, such as the business
// transaction, takes the claim from the context ([ClaimFrom]) and settles it.
// [NewContext] puts a claim there, for a protocol other than HTTP.
package driver
