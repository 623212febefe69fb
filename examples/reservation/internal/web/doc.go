// Package web is the page of the shop: a map of seats to click, what goes on behind it, live, and buttons that try
// to break it.
//
// The page buys and looks through the API, as every client does. What no client may do, such as to switch a server
// off, it does at addresses of its own below /shop/, which are there only where Config.Trials are.
package web
