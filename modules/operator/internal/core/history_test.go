package core

import (
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/modules/operator"
)

// A problem began after the last step without it, also before the hour that is kept in fine steps.
func TestVerdict_date(t *testing.T) {
	t.Parallel()
	at := time.Date(2026, 1, 2, 12, 0, 0, 0, time.UTC)
	series := func(step time.Duration, dead ...int) (all []operator.Figures) {
		for i, n := range dead {
			f := operator.Figures{At: at.Add(-time.Duration(len(dead)-i) * step), Part: "billing", Measured: true, Dead: n, Problems: n}
			all = append(all, f, operator.Figures{At: f.At, Part: "other", Measured: true})
		}
		return all
	}
	for name, c := range map[string]struct {
		h    History
		want time.Duration // before at; -1: unknown
	}{
		"in the hour":          {History{Hour: series(HourStep, 0, 3, 0, 1, 2), Day: series(DayStep, 1, 1)}, 2 * HourStep},
		"before the hour":      {History{Hour: series(HourStep, 1, 1), Day: series(DayStep, 0, 1, 1, 1)}, 3 * DayStep},
		"all the day":          {History{Hour: series(HourStep, 1, 1), Day: series(DayStep, 1, 1)}, 2 * DayStep},
		"after the last step":  {History{Hour: series(HourStep, 1, 0)}, 0},
		"no history":           {History{}, -1},
		"a history that fails": {History{Hour: series(HourStep, 1), Error: "down"}, -1},
	} {
		for _, dead := range []bool{true, false} {
			v := Verdict{Problems: []Problem{{Part: "billing", dead: dead}}}
			v.date(&c.h, at)
			want := at.Add(-c.want)
			if c.want < 0 {
				want = time.Time{}
			}
			if got := v.Problems[0].Since; !got.Equal(want) {
				t.Errorf("%s, dead letters %v: since %s, want %s", name, dead, got, want)
			}
		}
	}
	known := Verdict{Problems: []Problem{{Part: "billing", Since: at}}}
	known.date(&History{Hour: series(HourStep, 1, 1)}, at)
	if !known.Problems[0].Since.Equal(at) {
		t.Error("the history replaces a known time")
	}
}
