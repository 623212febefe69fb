// Package memqueue is a transport of the consumer engine in memory: a Broker with queues, retries
// and dead letters, and Sources that hand their messages out at least once. Faults of every step of
// the contract are scripted by Options.Fault.
//
// All waiting is done on channels and by package time, so it works in testing/synctest bubbles.
package memqueue
