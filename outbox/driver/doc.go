// Package driver is what an implementer of a store or of a transport needs of the outbox, and a user
// does not: the contracts of a [Source] and a [Publisher], and their data. Package outbox has what
// users need.
//
// The package outbox/outboxtest/conformance has the suites that implementations must pass.
package driver
