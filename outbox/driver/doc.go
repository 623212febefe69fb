// Package driver defines the contracts for implementers of a store or a transport: [Source],
// [Publisher] and their data types. Users of the outbox need package outbox only.
//
// Package outbox/outboxtest/conformance has the test suites that implementations must pass.
package driver
