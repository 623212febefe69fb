// Package browser tests the pages of the reservation example in a real Chromium: a shop runs as a process, in memory and
// on real servers, and the tests click and type what a visitor would. The operator's page stands over very many dead
// letters, too.
//
// go run ./internal/lab/servers -- go test ./internal/lab/browser finds the browser, or installs it. What a page looked
// like when its test failed is kept with -artifacts.
package browser
