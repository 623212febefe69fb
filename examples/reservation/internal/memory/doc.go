// Package memory keeps the shop in this process: the ports of package booking on
// the fakes that the libraries come with. Nothing survives the process and
// nothing has to be installed, but what a client sees is the same as with real
// servers: messages go through an outbox, a relay, a broker and an inbox here too.
package memory
