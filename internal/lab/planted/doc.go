// Command planted plants known bugs, one after the other, and has the checks of this repository find them: a
// check that cannot fail proves nothing.
//
//	go run ./internal/lab/planted
//	go run ./internal/lab/planted -only=dedup -seeds=5000
//
// A bug is a change to one file, compiled in by the overlay of the go command, so that no file of the
// repository is touched. For each the command runs the check that must catch it: the simulation of package
// sim, or a suite of the package. It prints which caught it, and after how many schedules, and fails where one
// got away. The table in report.md is its output.
package main
