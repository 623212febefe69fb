package audit_test

import (
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/internal/lab/harness/audit"
)

// asked are so many requests, one after the other, each of which takes as long.
func asked(n, status int, from time.Time, takes time.Duration) (all []audit.Asked) {
	for range n {
		all = append(all, audit.Asked{Sent: from, Answered: from.Add(takes), Status: status})
		from = from.Add(takes)
	}
	return all
}

func TestLimit(t *testing.T) {
	t.Parallel()
	minute := time.Date(2031, 5, 4, 12, 30, 0, 0, time.UTC)
	at := func(s int) time.Time { return minute.Add(time.Duration(s) * time.Second) }
	flush := audit.Forgotten{From: at(10), To: at(11), Times: 1}
	earlier := audit.Forgotten{From: at(-20), To: at(-10), Times: 1}
	over := audit.Forgotten{From: at(-20), To: at(10), Times: 1}
	later := audit.Forgotten{From: at(60), To: at(61), Times: 1}
	for name, c := range map[string]struct {
		asked     []audit.Asked
		forgotten []audit.Forgotten
		want      string
	}{
		"as many as there may be":              {asked: asked(5, audit.StatusAdmitted, at(1), time.Second)},
		"one more":                             {asked: asked(6, audit.StatusAdmitted, at(1), time.Second), want: audit.OverLimit},
		"denied, undecided and not answered":   {asked: append(asked(6, audit.StatusDenied, at(1), 1), append(asked(6, audit.StatusUndecided, at(1), 1), asked(6, 0, at(1), 1)...)...)},
		"as many in each of two windows":       {asked: append(asked(5, audit.StatusAdmitted, at(50), time.Second), asked(5, audit.StatusAdmitted, at(60), time.Second)...)},
		"some may belong to the window before": {asked: append(asked(1, audit.StatusAdmitted, at(-1), 2*time.Second), asked(5, audit.StatusAdmitted, at(30), time.Second)...)},
		"forgotten once":                       {asked: asked(10, audit.StatusAdmitted, at(1), time.Second), forgotten: []audit.Forgotten{flush}},
		"more than forgotten once":             {asked: asked(11, audit.StatusAdmitted, at(1), time.Second), forgotten: []audit.Forgotten{flush}, want: audit.OverLimit},
		"forgotten twice":                      {asked: asked(15, audit.StatusAdmitted, at(1), time.Second), forgotten: []audit.Forgotten{flush, over}},
		"forgotten before and afterwards":      {asked: asked(6, audit.StatusAdmitted, at(1), time.Second), forgotten: []audit.Forgotten{earlier, later}, want: audit.OverLimit},
		"an error":                             {asked: asked(1, 500, at(1), time.Second), want: audit.Refused},
		"admitted and served":                  {asked: asked(1, 201, at(1), time.Second), want: audit.Refused},
	} {
		h := newSound().History
		h.Limit = audit.Limit{Max: 5, Window: time.Minute, Asked: c.asked, Forgotten: c.forgotten}
		r := audit.Check(h)
		if c.want == "" && len(r.Findings) > 0 || c.want != "" && r.Counts[c.want] != 1 {
			t.Errorf("%s: %+v, want %q", name, r.Findings, c.want)
		}
	}
}

// A limit without a denial is a finding.
func TestEmptyLimit(t *testing.T) {
	t.Parallel()
	minute := time.Date(2031, 5, 4, 12, 30, 0, 0, time.UTC)
	l := audit.Limit{Max: 5, Window: time.Minute}
	if found := l.Empty(); len(found) != 1 || found[0].Kind != audit.NeverDenied {
		t.Errorf("nobody asked: %+v", found)
	}
	for _, status := range []int{0, audit.StatusAdmitted, audit.StatusUndecided} {
		l.Asked = append(l.Asked, asked(3, status, minute, time.Second)...)
	}
	if found := l.Empty(); len(found) != 1 || found[0].Kind != audit.NeverDenied {
		t.Errorf("nobody was denied: %+v", found)
	}
	l.Asked = append(l.Asked, asked(1, audit.StatusDenied, minute, time.Second)...)
	if found := l.Empty(); len(found) > 0 {
		t.Errorf("%+v", found)
	}
}
