package txretry

import "time"

// The phases of an attempt, as Attempt.Phase names them, in their order.
const (
	phaseAcquire = "acquire"
	phaseBegin   = "begin"
	phaseFn      = "fn"
	phaseCommit  = "commit"
)

// phases is the time spent in the parts of a call, over all its attempts.
type phases struct {
	queue   time.Duration // waiting for the turn of a serial key
	acquire time.Duration // waiting for a connection
	begin   time.Duration
	fn      time.Duration
	commit  time.Duration
	resolve time.Duration // asking what became of a COMMIT
	sleep   time.Duration // between attempts, their rollbacks included
}

// each calls f for the phases that took time.
func (p *phases) each(f func(phase string, spent time.Duration)) {
	for _, part := range [...]struct {
		name  string
		spent time.Duration
	}{
		{"queue", p.queue},
		{phaseAcquire, p.acquire},
		{phaseBegin, p.begin},
		{phaseFn, p.fn},
		{phaseCommit, p.commit},
		{"resolve", p.resolve},
		{"sleep", p.sleep},
	} {
		if part.spent > 0 {
			f(part.name, part.spent)
		}
	}
}
