// Package archtest tests the import rules of this repository: which package may compile which
// client, that no core imports another core, that the example imports public packages only, and
// that every package with tests detects leaked goroutines. The table in floors_test.go lists all
// packages; add a new package there.
package archtest
