// Package browser tests the pages of the reservation example in a real Chromium: a shop runs as a process, in memory and
// on real servers, and the tests click and type what a visitor would. The operator's page stands over very many dead
// letters, too.
//
// `make browser` runs them in the night: the module is not in go.work, so that nobody else compiles its tools. The command
// finds the browser, or installs it. The page of a failed test is kept with -artifacts.
package browser
