// Package faults holds the tests that kill the processes of the packages and break their real servers,
// where a simulation on the fakes is not enough. It has no code of its own.
//
// A kill between COMMIT and acknowledgement runs with every change, once for each adapter. All other tests
// run at night: they kill at every other point, and hold recoveries to the promised time on a calm machine.
// The whole shop under many faults at once is the subject of package chaos.
package faults
