// Package outboxtest is the outbox in memory, for unit tests and for
// demonstrations without a server: [Store] is writer, source and dead letters in
// one, on the transactions of txretrytest, and [Publisher] records what it is
// given and fails by script.
//
// Both keep the promises of the real ones and pass the same suite,
// outboxtest/conformance. All waiting is done with package time, so that tests
// may run in a testing/synctest bubble.
package outboxtest
