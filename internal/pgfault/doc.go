// Package pgfault makes one statement of a process's connections to Postgres fail: the process stops
// there, or its connection is lost, or the server refuses the statement.
//
// A [Line] stands for the connections of one process. It reads the protocol above TLS, so it knows the
// statements whichever way pgx sends them, and the server is the real one.
package pgfault
