// Command planted plants known bugs, one after the other, and has the checks of this repository find them: a
// check that cannot fail proves nothing.
//
//	go run ./internal/lab/servers -- go run ./internal/lab/planted
//	go run ./internal/lab/planted -only=dedup -seeds=5000
//
// The first has servers for the suites; the simulation needs none.
//
// A bug is a change to one file, compiled in by the overlay of the go command, so that no file of the
// repository is touched. For each the command runs the check that must catch it: the simulation of package
// sim, or a suite of the package. It prints which caught it, and after how many schedules, and fails where one
// got away, or where a check fails without any. The table in report.md is its output.
package main
