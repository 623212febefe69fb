package main

import (
	"errors"
	"fmt"
	"io"
)

// noise is by how much a ratio may be worse before that is a regression.
const noise = 0.05

// regressions prints the ratios that are worse than in an earlier report: the medians by more than
// the noise, and no round as good as the worst round before. It fails if there are any.
func (r *report) regressions(before report, out io.Writer) error {
	type place struct{ title, row, yardstick string }
	old := map[place]spread{}
	for _, t := range before.Tables {
		for _, row := range t.Rows {
			for i, ratio := range row.Ratios {
				old[place{t.Title, row.Name, t.Yardsticks[i]}] = ratio
			}
		}
	}
	compared, worse := 0, 0
	fmt.Fprintln(out, "\nratios since the earlier report")
	for _, t := range r.Tables {
		for _, row := range t.Rows {
			for i, now := range row.Ratios {
				then, known := old[place{t.Title, row.Name, t.Yardsticks[i]}]
				if !known || row.Name == t.Yardsticks[i] {
					continue
				}
				compared++
				if regressed(moreIsBetter(t.Columns[0]), then, now) {
					worse++
					fmt.Fprintf(out, "worse  %s: %s: %s of %s, was %s\n", t.Title, row.Name, now, t.Yardsticks[i], then)
				}
			}
		}
	}
	fmt.Fprintf(out, "%d ratios compared, %d are worse\n", compared, worse)
	if compared == 0 {
		return errors.New("the earlier report has no ratio of what was measured now")
	}
	if worse > 0 {
		return fmt.Errorf("%d ratios are worse than before", worse)
	}
	return nil
}

func regressed(moreIsBetter bool, then, now spread) bool {
	if moreIsBetter {
		return now.median < then.median*(1-noise) && now.most < then.least
	}
	return now.median > then.median*(1+noise) && now.least > then.most
}
