// Package faults holds the tests that break what the packages stand on: the
// servers, the network between, and the processes themselves. It has no code of
// its own; the pieces its tests share lie in its test files.
//
// # How it is told whether anything was lost
//
// Writers (load) commit business transactions with messages: keyed and not, some
// rolled back on purpose, some that take a low sequence number and commit late.
// Each message leaves a deed in a table of the same transaction, so that the
// database says in the end what committed, also where a writer never heard. A
// ledger (package ledger) holds what the writers were told and what a consumer received, in order,
// and its audit compares the three: everything that committed was delivered,
// nothing that rolled back was, and the first deliveries of each key came in the
// order of the commits. Repeats are counted, with how far back they went, and each
// test says how many its faults explain.
//
// # Short and long
//
// go test runs a short form of every test. HOLDFAST_CHAOS_ROUNDS=200 (make faults)
// runs twenty times as many faults; 10 is the short form. A failure prints its
// HOLDFAST_CHAOS_SEED, which chooses the same faults and transactions again, though
// never the same moments.
package faults
