// Package memqueue is a transport of the consumer engine in memory: a Broker with queues, retries and dead
// letters, and Sources that deliver their messages at least once. Options.Fault scripts faults of every step
// of the contract.
//
// All waiting uses channels and package time, so it works in testing/synctest bubbles.
package memqueue
