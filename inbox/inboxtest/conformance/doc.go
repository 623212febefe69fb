// Package conformance holds the suites that every processor of messages, store of dedup entries,
// ledger, parking, transport and consumer must pass, those of this module and those of others:
// TestProcessor, TestEntries, TestLedger, TestParking, TestSource and TestConsumer.
package conformance
