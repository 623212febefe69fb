// Package connections holds the tests of how services connect to their servers: over TLS with an
// authority of their own, and with passwords that change while they run.
package connections
