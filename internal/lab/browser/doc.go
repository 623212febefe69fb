// Package browser tests the pages of the reservation example in a real Chromium: a shop in memory runs as a process,
// and the tests click what a visitor would.
//
// go run ./internal/lab/servers -- go test ./internal/lab/browser finds the browser, or installs it. What a page looked
// like when its test failed is kept with -artifacts.
package browser
