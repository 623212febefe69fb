// Package shoptest is the ticket shop in memory for programs that test it as a whole, such as a simulation:
// the same handlers, relay, consumer and sweeper as in the program, any number of each, as if in processes of
// their own, over one set of fakes. What they ask their servers passes a Wire, which may delay it, refuse
// it or lose it.
package shoptest
