package engine

import (
	"time"

	"github.com/holdfast-go/holdfast/internal/backoff"
)

const (
	// probeWait is how long a probe waits for the first message of the queue.
	probeWait = time.Second

	// probeGap is how long it waits for a further one.
	probeGap = 100 * time.Millisecond

	// probeRun is how long it waits for one of those that run to end before it tries more: handlers may
	// take their time, and would tell nothing meanwhile.
	probeRun = 2 * time.Second
)

// probes are the waits before a paused consumer tries messages: 0.5 s growing to 2 s, spread by
// half. Not more, since the ones before may have failed by themselves, and a pause outlives its
// cause.
var probes = backoff.Policy{Base: 500 * time.Millisecond, Max: 2 * time.Second, Jitter: 0.5, JitterAfterCap: true}

// gate says whether messages may begin.
type gate uint8

const (
	open gate = iota
	shut
	probing // a few may, to see whether a server is there again
)

// pause is the gate between what is in hand and the workers, and the probes while it is shut since a
// server is down that processing needs. It has no clock.
type pause struct {
	cfg     *settings
	halted  bool // by an operator, or that is not known yet: nothing begins, and the gate stays as it is
	told    bool // it is known whether an operator has paused it
	gate    gate
	n       int       // probes so far
	at      time.Time // shut: when the next probe begins; probing: how long it waits for messages, zero: it has not begun to
	early   bool      // probing: before the first pause, since nothing has shown yet that a server is down
	most    int       // messages of a probe
	round   int       // the probe's number
	begun   int
	ended   int
	since   time.Time // when the last one began, or it grew
	aside   int       // messages that arrived and would show nothing
	down    bool      // one of them could not be processed
	inPlace bool      // the trial's own messages are the probe
	cause   error     // the last failure that looked like an outage
}

// room is how many messages may begin now, together. Probes are tried one by one.
func (p *pause) room(all int) int {
	switch {
	case p.halted || p.gate == shut:
		return 0
	case p.gate == probing:
		return min(p.most-p.begun, all, 1)
	}
	return all
}

// begin notes which messages begin.
func (p *pause) begin(j *job) {
	for _, it := range j.items {
		it.probe = 0
		if p.gate == probing {
			it.probe = p.round
			p.begun++
			p.since = j.began
		}
	}
}

// probed notes the end of a message that may have been a probe. It reports whether that ends the
// pause.
func (p *pause) probed(it *item, down, passed bool) (over bool) {
	if p.gate != probing || it.probe != p.round {
		return false
	}
	it.probe = 0
	p.ended++
	p.down = p.down || down
	return passed
}

// shut begins a pause, or its next one, and returns how long it is.
func (p *pause) shut(now time.Time, random float64) time.Duration {
	if p.gate == open || p.early {
		p.n = 0
	} else {
		p.n++
	}
	delay := probes.Delay(p.n, random)
	p.gate, p.at, p.early = shut, now.Add(delay), false
	return delay
}

// probe begins a probe of some messages, more each time: the first ones may be those that fail by
// themselves.
func (p *pause) probe(left int) { p.start(1<<min(p.n, 10), left) }

// doubt begins a probe without a pause before it: of the trial's own messages, and what arrives beside
// them.
func (p *pause) doubt(left int) {
	p.start(outage, left)
	p.early, p.inPlace = true, true
}

func (p *pause) start(most, left int) {
	p.gate, p.at, p.round = probing, time.Time{}, p.round+1
	p.most = max(min(most, p.cfg.Concurrency, left), 1)
	p.begun, p.ended, p.aside, p.down, p.inPlace = 0, 0, 0, false, false
}

// on reports whether a server seems to be down.
func (p *pause) on() bool { return p.gate != open && (!p.early || p.down) }

// window is how many messages a probe may hold. It grows with those set aside, which may be all that the
// queue has at its head.
func (p *pause) window() int { return min(p.most+4*p.aside, max(p.most, maxTrial)) }

// listen notes that a probe's messages may arrive, or have.
func (p *pause) listen(now time.Time, patience time.Duration) {
	if p.gate == probing {
		p.at = now.Add(patience)
	}
}

// verdict tells what a probe has shown so far.
type verdict uint8

const (
	undecided verdict = iota
	stillDown
	nothingDown // none shows that a server is missing
	noOther     // there are no messages but those of the trial: they are the probe
)

// verdict looks at a probe. Held is how many messages are on trial.
func (p *pause) verdict(now time.Time, held int) verdict {
	waited := !p.at.IsZero() && !now.Before(p.at)
	switch {
	case p.ended < p.begun || p.begun < p.most && !waited:
		return undecided
	case p.begun > 0 && p.down:
		return stillDown
	case p.begun == 0 && !p.inPlace && held > 0:
		return noOther
	}
	return nothingDown
}

// lasting reports whether a probe may grow: all its messages run, and not all workers.
func (p *pause) lasting() bool {
	return p.gate == probing && p.ended == 0 && p.begun == p.most && p.most < p.cfg.Concurrency
}

// grow has a probe that lasts try twice as many messages.
func (p *pause) grow(now time.Time) {
	if p.lasting() && !now.Before(p.since.Add(probeRun)) {
		p.most, p.since = min(2*p.most, p.cfg.Concurrency), now
	}
}

// reopen ends the pause.
func (p *pause) reopen() { p.gate, p.at, p.early = open, time.Time{}, false }

// wake returns when something is due that no event tells of; zero: nothing is.
func (p *pause) wake() time.Time {
	switch {
	case p.halted || p.gate == open:
		return time.Time{}
	case p.lasting():
		return p.since.Add(probeRun)
	case p.gate == probing && p.ended < p.begun:
		return time.Time{}
	}
	return p.at
}
