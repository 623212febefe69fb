package httpapi

import (
	"context"
	"log/slog"
	"sync"
	"time"
)

const (
	readyTimeout = 2 * time.Second
	// readyFor is how long an answer holds, so that questions cost the servers nothing, however many there are.
	readyFor = time.Second
)

// Check asks one part of the process whether it is ready.
type Check struct {
	Name  string
	Ready func(ctx context.Context) error
}

// readiness asks all checks, once for everybody who wants to know within readyFor.
type readiness struct {
	checks []Check
	log    *seldom

	turn    chan struct{} // holds a value while the checks are asked, or their answer is read
	asked   time.Time
	unready []string
}

func newReadiness(checks []Check, log *slog.Logger) *readiness {
	return &readiness{checks: checks, log: newSeldom(log), turn: make(chan struct{}, 1)}
}

// waitingFor returns the names of the checks that are not well.
func (r *readiness) waitingFor(ctx context.Context) []string {
	r.turn <- struct{}{}
	defer func() { <-r.turn }()
	if !r.asked.IsZero() && time.Since(r.asked) < readyFor {
		return r.unready
	}
	ctx, cancel := context.WithTimeout(ctx, readyTimeout)
	defer cancel()
	r.unready = nil
	for i, err := range r.askAll(ctx) {
		if err != nil {
			name := r.checks[i].Name
			r.unready = append(r.unready, name)
			r.log.write(ctx, slog.LevelWarn, "not ready", name, slog.String("check", name), slog.Any("error", err))
		}
	}
	r.asked = time.Now()
	return r.unready
}

// askAll asks all at the same time: one that hangs says nothing about the others.
func (r *readiness) askAll(ctx context.Context) []error {
	errs := make([]error, len(r.checks))
	var asking sync.WaitGroup
	for i, check := range r.checks {
		asking.Go(func() { errs[i] = check.Ready(ctx) })
	}
	asking.Wait()
	return errs
}
