package sim

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/holdfast-go/holdfast/examples/reservation/shoptest"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

// world is one schedule: the shop, its processes, its clients and what they were told.
type world struct {
	dice  dice
	plan  plan
	keep  func(fault string) bool // nil: all happen
	began time.Time

	ctx     context.Context // of all processes
	end     context.CancelFunc
	ending  context.Context // is over when all processes are told to end
	tellAll context.CancelFunc
	shop    *shoptest.Shop
	history history
	remains sync.WaitGroup // of killed processes

	servants servants

	mu       sync.Mutex
	apis     [processes]*process // nil while one is down
	fired    map[string]bool
	findings []string
}

// now is the time since the schedule began.
func (w *world) now() time.Duration { return time.Since(w.began) }

// isFaulty reports whether faults happen.
func (w *world) isFaulty() bool { return w.now() < w.plan.faulty }

// isAway reports whether a server is not there.
func (w *world) isAway(server string) bool {
	now := w.now()
	for i, o := range w.plan.away {
		if o.server == server && o.from <= now && now < o.end && w.fires(away, fmt.Sprintf("%s for the %d. time", server, i+1)) {
			return true
		}
	}
	return false
}

// fires notes a fault that was rolled, and reports whether it happens.
func (w *world) fires(k kind, where string) bool {
	if !w.happens(k, where) {
		return false
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.fired[name(k, where)] = true
	return true
}

// script is what befalls attempts of transactions.
func (w *world) script() []txretrytest.Fault {
	script := slices.Clone(w.plan.script)
	for i, f := range script {
		if !w.happens(kindOf(f), placeOf(i)) {
			script[i] = txretrytest.Fault{}
		}
	}
	return script
}

func (w *world) struck(attempt int, f txretrytest.Fault) { w.fires(kindOf(f), placeOf(attempt)) }

// happens reports whether a fault is not left out.
func (w *world) happens(k kind, where string) bool { return w.keep == nil || w.keep(name(k, where)) }

func name(k kind, where string) string { return string(k) + ": " + where }

// found notes what is wrong.
func (w *world) found(format string, args ...any) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.findings = append(w.findings, fmt.Sprintf(format, args...))
}

// api returns a process that serves requests, the first choice if that is up; nil if none is.
func (w *world) api(choice int) *process {
	w.mu.Lock()
	defer w.mu.Unlock()
	for i := range processes {
		if p := w.apis[(choice+i)%processes]; p != nil && !p.dead.Load() {
			p.requests.Add(1)
			return p
		}
	}
	return nil
}

func (w *world) setAPI(number int, p *process) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.apis[number] = p
}
