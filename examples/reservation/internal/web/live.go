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
	// liveEvery is how often a live page is updated.
	liveEvery = 500 * time.Millisecond
	// streamTime bounds a stream. The browser then opens another.
	streamTime = time.Minute
	// writeTimeout bounds each event, for a viewer who has vanished.
	writeTimeout = 10 * time.Second
	// lookTimeout bounds the look for one event.
	lookTimeout = time.Second
)

var userPattern = regexp.MustCompile(`^[A-Za-z0-9._-]{1,64}$`)

// state is the state on a live page. null or missing means unknown: the page then shows ? for a count, Unknown for the
// limits, and leaves the steps and the switches as they are.
type state struct {
	Counts  map[flow.Stage]int64 `json:"counts"`
	Steps   []flow.Step          `json:"steps"`
	Limits  []gauge              `json:"limits"`
	Backlog flow.Backlog         `json:"backlog"`
	Trials  *trialsState         `json:"trials,omitempty"`
}

// trialsState has the current faults.
type trialsState struct {
	Slow bool `json:"slow"`
	// Off reports for each server whether it is switched off.
	Off map[string]bool `json:"off"`
}

// live streams the state until the viewer leaves, the stream's time is over or the page is closed.
func (p *Page) live(w http.ResponseWriter, r *http.Request) {
	user := r.URL.Query().Get("user")
	if !userPattern.MatchString(user) {
		http.Error(w, "the user is missing or invalid", http.StatusBadRequest)
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
		if ctx.Err() != nil { // the look was cut short
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
	_ = control.SetWriteDeadline(time.Now().Add(writeTimeout)) // if it is not supported, the server's own deadline counts
	if _, err := fmt.Fprintf(w, "data: %s\n\n", data); err != nil {
		return err
	}
	return control.Flush()
}

// Peeker is a limiter with Peek.
type Peeker interface {
	// Peek returns the decision as if the charges had been taken, but charges nothing.
	Peek(ctx context.Context, charges ...ratelimit.Charge) (ratelimit.Decision, error)
}

// Limits are the limits of POSTs.
type Limits struct {
	Limiter Peeker
	User    ratelimit.Limit
	Global  ratelimit.Limit // Max is 0 if there is none
}

// gauge is the rest of a limit.
type gauge struct {
	Name string `json:"name"`
	Left int64  `json:"left"`
	Max  int64  `json:"max"`
	// Reset is in how many seconds more is left.
	Reset float64 `json:"reset"`
}

// look returns the gauges of a user. They are nil if any limit is unknown.
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
				s.Remaining++ // Peek answers as if its unit had been charged
			}
			gauges = append(gauges, gauge{s.Name, s.Remaining, s.Max, s.Reset.Seconds()})
		}
	}
	return gauges
}
