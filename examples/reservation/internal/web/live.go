package web

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"regexp"
	"time"

	"github.com/holdfast-go/holdfast/examples/reservation/internal/flow"
	"github.com/holdfast-go/holdfast/ratelimit"
)

const (
	// liveEvery is how often a live page is brought up to date.
	liveEvery = 500 * time.Millisecond
	// streamTime is after how long a stream ends, and the browser begins another.
	streamTime = time.Minute
	// writeTimeout bounds each event, for a viewer who has vanished.
	writeTimeout = 10 * time.Second
	// lookTimeout bounds the look at what an event tells.
	lookTimeout = time.Second
)

var userPattern = regexp.MustCompile(`^[A-Za-z0-9._-]{1,64}$`)

// state is what a live page is told. Of what is null or missing nothing is known: the page shows ? for a count, says that the
// limits are unknown, and leaves the steps and the switches as they are.
type state struct {
	Counts  map[flow.Stage]int64 `json:"counts"`
	Steps   []flow.Step          `json:"steps"`
	Limits  []gauge              `json:"limits"`
	Backlog flow.Backlog         `json:"backlog"`
	Trials  *trialsState         `json:"trials,omitempty"`
}

// trialsState is what is broken now.
type trialsState struct {
	Slow bool `json:"slow"`
	// Off tells of each server whether it is switched off.
	Off map[string]bool `json:"off"`
}

// live sends the state again and again until the viewer leaves, the stream's time is over or the page is closed.
func (p *Page) live(w http.ResponseWriter, r *http.Request) {
	user := r.URL.Query().Get("user")
	if !userPattern.MatchString(user) {
		http.Error(w, "say which user's limits to show", http.StatusBadRequest)
		return
	}
	select {
	case p.streams <- struct{}{}:
		defer func() { <-p.streams }()
	default:
		http.Error(w, "too many pages are live", http.StatusServiceUnavailable)
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), streamTime)
	defer cancel()
	w.Header().Set("Content-Type", "text/event-stream")
	w.Header().Set("X-Accel-Buffering", "no")
	tick := time.NewTicker(liveEvery)
	defer tick.Stop()
	if _, err := fmt.Fprintf(w, "retry: %d\n", liveEvery.Milliseconds()); err != nil {
		return
	}
	for {
		seen := p.look(ctx, user)
		if ctx.Err() != nil { // what it has seen may lack what there was no time for
			return
		}
		if err := send(w, seen); err != nil {
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-p.ended:
			return
		case <-tick.C:
		}
	}
}

func (p *Page) look(ctx context.Context, user string) state {
	ctx, cancel := context.WithTimeout(ctx, lookTimeout)
	defer cancel()
	s := state{Limits: p.cfg.Limits.look(ctx, user)}
	if counts, steps, err := p.cfg.Flow.Look(ctx); err == nil {
		s.Counts, s.Steps = counts, steps
	}
	if backlog, err := p.cfg.Backlog(ctx); err == nil {
		s.Backlog = backlog
	}
	s.Trials = p.lookAtTrials(ctx)
	return s
}

func (p *Page) lookAtTrials(ctx context.Context) *trialsState {
	if p.cfg.Trials == nil {
		return nil
	}
	slow, err := p.cfg.Trials.Slow(ctx)
	if err != nil {
		return nil
	}
	t := &trialsState{Slow: slow, Off: map[string]bool{}}
	for _, server := range p.cfg.Servers {
		t.Off[server.Name()] = server.Off()
	}
	return t
}

// send writes one event.
func send(w http.ResponseWriter, s state) error {
	data, err := json.Marshal(s)
	if err != nil {
		return err
	}
	control := http.NewResponseController(w)
	_ = control.SetWriteDeadline(time.Now().Add(writeTimeout)) // where there is none, the server's own counts
	if _, err := fmt.Fprintf(w, "data: %s\n\n", data); err != nil {
		return err
	}
	return control.Flush()
}

// Peeker is a limiter that can be looked at.
type Peeker interface {
	// Peek returns what would be decided now, as if the charges had been taken, and charges nothing.
	Peek(ctx context.Context, charges ...ratelimit.Charge) (ratelimit.Decision, error)
}

// Limits are what POSTs are limited by.
type Limits struct {
	Limiter Peeker
	User    ratelimit.Limit
	Global  ratelimit.Limit // Max is 0 where there is none
}

// gauge is what is left of a limit.
type gauge struct {
	Name string `json:"name"`
	Left int64  `json:"left"`
	Max  int64  `json:"max"`
	// Reset is in how many seconds there is more.
	Reset float64 `json:"reset"`
}

// look returns the gauges of a user; nil while the limiter cannot tell all of them.
func (l Limits) look(ctx context.Context, user string) []gauge {
	charges := []ratelimit.Charge{{Limit: l.User, Key: user}}
	if l.Global.Max > 0 {
		charges = append(charges, ratelimit.Charge{Limit: l.Global})
	}
	var gauges []gauge
	for _, charge := range charges {
		d, err := l.Limiter.Peek(ctx, charge)
		if err != nil || d.Fallback {
			return nil
		}
		for _, s := range d.Limits() {
			if d.Allowed {
				s.Remaining++ // a look is answered as if its unit had been taken
			}
			gauges = append(gauges, gauge{s.Name, s.Remaining, s.Max, s.Reset.Seconds()})
		}
	}
	return gauges
}
