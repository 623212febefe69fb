package main

import (
	"errors"
	"testing"
	"time"
)

// A machine that is busy for a while does not make the large table dearer, and one round is no verdict.
func TestSameCost(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		large, busy float64 // factors of the cost, in all rounds and in two of them
		same        bool
	}{
		"the same":                   {1, 1, true},
		"a fifth more":               {1.2, 1, true},
		"busy":                       {1.2, 3, true},
		"dearer":                     {1.7, 1, false},
		"dearer and busy all along":  {1.7, 2, false},
		"dearer by the table's size": {40, 1, false},
	} {
		round := 0
		times := func(factor float64) func() (cost, error) {
			return func() (cost, error) {
				round++
				if round > 3 && round <= 7 {
					factor *= c.busy
				}
				return cost{ops: 1000, took: time.Second, postgres: time.Duration(factor * float64(time.Second))}, nil
			}
		}
		both, err := alternate(times(1), times(c.large))
		if err != nil {
			t.Fatal(err)
		}
		r := &report{}
		r.sameCost("it", both)
		if r.Findings[0].OK != c.same {
			t.Errorf("%s: %v, want %v", name, r.Findings[0], c.same)
		}
	}
	broken := errors.New("broken")
	if _, err := alternate(func() (cost, error) { return cost{}, nil }, func() (cost, error) { return cost{}, broken }); !errors.Is(err, broken) {
		t.Errorf("alternate: %v, want %v", err, broken)
	}
}
