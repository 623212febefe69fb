package sim

import "testing"

// Shrink looks for few faults with which the schedule of a seed still goes wrong, and returns the result
// with these. A schedule that goes well with the faults of failed is returned as it is: about one of
// fifteen does not come the same again.
func Shrink(t *testing.T, failed Result) Result {
	for pieces := 2; len(failed.Fired) > 1; {
		smaller, ok := without(t, failed, pieces)
		switch {
		case ok:
			failed, pieces = smaller, max(2, pieces-1)
		case pieces >= len(failed.Fired):
			return failed
		default:
			pieces = min(2*pieces, len(failed.Fired))
		}
	}
	return failed
}

// without leaves out one piece of the faults after the other, until it goes wrong without one.
func without(t *testing.T, failed Result, pieces int) (Result, bool) {
	for i := range pieces {
		from, to := i*len(failed.Fired)/pieces, (i+1)*len(failed.Fired)/pieces
		keep := map[string]bool{}
		for at, fault := range failed.Fired {
			keep[fault] = at < from || at >= to
		}
		smaller := Run(t, failed.Seed, func(fault string) bool { return keep[fault] })
		if len(smaller.Findings) > 0 && len(smaller.Fired) < len(failed.Fired) {
			return smaller, true
		}
	}
	return Result{}, false
}
