// Package conformance holds the suites that every processor of messages, store of dedup entries,
// ledger and consumer must pass, those of this module and those of others: TestProcessor, TestDedup,
// TestLedger and TestConsumer.
package conformance
