// Package archtest holds the import rules of this repository, as tests: which
// package may compile which client, that no core knows another, that the
// example lives on public packages alone, and that every package with tests
// looks for goroutines they leave behind. The table in floors_test.go is the
// list of all packages; a new one must be entered there.
package archtest
