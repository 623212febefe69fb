// Package conformance holds the suites that every processor of messages and every store of
// dedup entries must pass, those of this module and those of others: TestProcessor and TestDedup.
package conformance
