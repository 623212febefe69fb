package engine

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/internal/ids"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

func newItem() *item {
	d := &delivered{inbox.Message{ID: ids.New(), Name: "x", Attempt: 1}}
	return &item{d: d, m: d.Message(), session: &session{}, index: -1}
}

// TestPauseModel plays outages, poisons and passes at random: the gate lets only so many through, a
// pause ends after the outage does, and no message is found guilty unless another passed after it
// had failed, twice.
func TestPauseModel(t *testing.T) {
	t.Parallel()
	for range testenv.Sequences(t, 200) {
		cfg := &settings{Config: Config{ConsumerConfig: inbox.ConsumerConfig{Concurrency: 1 + rand.N(4), Prefetch: 50, Batch: 1}}}
		tr, p := newTrial(cfg), &pause{cfg: cfg}
		now := time.Unix(1_700_000_000, 0)
		poison := map[*item]int{} // how often it was controlled since it failed
		failedAt := map[*item]int{}
		events := 0
		down := rand.N(2) == 0
		for range 200 {
			now = now.Add(time.Duration(rand.N(200)) * time.Millisecond)
			events++
			if rand.N(40) == 0 {
				down = !down
			}
			switch p.gate {
			case open:
				outage, inDoubt, spared := tr.judge(now, time.Time{})
				switch {
				case outage:
					p.shut(now, 0.5)
				case inDoubt:
					p.doubt(100)
					p.listen(now, probeGap)
					tr.release()
				default:
					for _, it := range spared {
						if !tr.struck(it) {
							t.Fatal("a message is sent away that was never controlled")
						}
					}
				}
			case shut:
				if p.room(100) != 0 {
					t.Fatal("a shut gate lets messages through")
				}
				if !now.Before(p.at) {
					p.probe(100)
					p.listen(now, probeWait)
				}
			case probing:
				switch p.verdict(now, len(tr.held)) {
				case undecided:
					p.grow(now)
				case stillDown:
					p.shut(now, 0.5)
				case nothingDown:
					p.reopen()
					tr.release()
				case noOther:
					p.inPlace = true
					p.listen(now, probeGap)
					tr.release()
				}
			}
			if p.room(100) == 0 {
				continue
			}
			it := newItem()
			if len(poison) > 0 && rand.N(3) == 0 { // one that comes again
				for known := range poison {
					it = known
					break
				}
			}
			_, bad := poison[it]
			if !bad && rand.N(5) == 0 {
				bad = true
				poison[it] = 0
			}
			j := &job{items: []*item{it}, began: now}
			p.begin(j)
			tr.begin(j)
			if p.gate == probing && p.begun > p.most {
				t.Fatalf("%d probes of %d", p.begun, p.most)
			}
			over := p.probed(it, down || bad, !down && !bad)
			if down || bad {
				it.fate = &fate{kind: hasFailed, failure: driver.Failure{Err: errTest}}
				tr.take(func(other *item) bool { return other == it })
				tr.failed(it, now)
				failedAt[it] = events
				continue
			}
			guilty, _ := tr.passed(it)
			for known, at := range failedAt {
				if at < events {
					poison[known]++
					delete(failedAt, known)
				}
			}
			for _, g := range guilty {
				if poison[g] < 2 {
					t.Fatalf("guilty after %d controls", poison[g])
				}
			}
			if over {
				p.reopen()
				tr.release()
			}
		}
	}
}

var errTest = inbox.Unavailable(errSimple("down"))

type errSimple string

func (e errSimple) Error() string { return string(e) }

// A pause lasts 0.5 s, growing to 2 s, and its probes grow to one for each worker.
func TestPauseSchedule(t *testing.T) {
	t.Parallel()
	cfg := &settings{Config: Config{ConsumerConfig: inbox.ConsumerConfig{Concurrency: 6}}}
	p := &pause{cfg: cfg}
	now := time.Unix(1_700_000_000, 0)
	for i, want := range []struct {
		delay time.Duration
		most  int
	}{{500 * time.Millisecond, 1}, {time.Second, 2}, {2 * time.Second, 4}, {2 * time.Second, 6}, {2 * time.Second, 6}} {
		if delay := p.shut(now, 0.5); delay != want.delay || p.wake() != now.Add(delay) {
			t.Errorf("pause %d lasts %v until %v", i, delay, p.wake())
		}
		p.probe(100)
		if p.most != want.most || p.room(100) != 1 {
			t.Errorf("probe %d is of %d messages, %d at once", i, p.most, p.room(100))
		}
	}
	p.probe(3)
	if p.most != 3 {
		t.Errorf("%d probes with 3 left", p.most)
	}
	p.reopen()
	p.doubt(100)
	if p.most != 6 || p.on() {
		t.Errorf("in doubt, %d messages are tried, and the pause is on: %v", p.most, p.on())
	}
	if delay := p.shut(now, 0.5); delay != 500*time.Millisecond || !p.on() {
		t.Errorf("the first pause after a doubt lasts %v, and is on: %v", delay, p.on())
	}
	p.probe(100)
	p.listen(now, probeWait)
	if got := p.verdict(now.Add(probeWait-1), 5); got != undecided {
		t.Errorf("verdict %d before anything arrived", got)
	}
	if got := p.verdict(now.Add(probeWait), 5); got != noOther {
		t.Errorf("verdict %d when nothing arrives", got)
	}
	if got := p.verdict(now.Add(probeWait), 0); got != nothingDown {
		t.Errorf("verdict %d of an empty queue", got)
	}
}
