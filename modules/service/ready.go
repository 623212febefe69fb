package service

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"slices"
	"sync"
	"time"
)

const (
	readyTimeout = 2 * time.Second
	// readyFor is how long an answer holds, so that probes cost the servers nothing, however many there are.
	readyFor = time.Second
)

// Ready returns a handler for readiness probes. It answers 200 while Run runs, every part is ready and every check
// returns nil; otherwise 503 with the names of the others. From the start of the shutdown on it answers 503. The
// checks ask the servers that requests need, by their names: "postgres": pool.Ping. Leave the broker out of the
// checks of an API that writes to an outbox. A liveness probe must not use this handler.
//
// Parts and checks are asked at the same time and have 2 s. The answer holds for 1 s for all callers. Errors go to
// the log, one line for each change; the answer has only names, as JSON. A check must end
// when its context does. The handler is safe for concurrent use.
func (g *Group) Ready(checks map[string]func(context.Context) error) http.Handler {
	return &readiness{group: g, checks: maps.Clone(checks), unready: map[string]bool{}, turn: make(chan struct{}, 1)}
}

type readiness struct {
	group  *Group
	checks map[string]func(context.Context) error

	turn    chan struct{} // holds a value while somebody asks or reads the fields below
	asked   time.Time
	waiting []string        // who was not ready, sorted
	unready map[string]bool // the same, for the log
}

// ServeHTTP implements http.Handler.
func (r *readiness) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	answer := r.answer(context.WithoutCancel(req.Context())) // others use the answer, too
	body, err := json.Marshal(answer)
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	if answer.Status != statusReady {
		w.WriteHeader(http.StatusServiceUnavailable)
	}
	_, _ = w.Write(body) // a prober that has left misses nothing
}

const statusReady = "ready"

type readyAnswer struct {
	Status     string   `json:"status"`
	WaitingFor []string `json:"waiting_for,omitempty"`
}

func (r *readiness) answer(ctx context.Context) readyAnswer {
	switch r.group.current() {
	case starting:
		return readyAnswer{Status: "starting"}
	case stopping:
		return readyAnswer{Status: "stopping"}
	}
	if waiting := r.waitingFor(ctx); len(waiting) > 0 {
		return readyAnswer{"not ready", waiting}
	}
	return readyAnswer{Status: statusReady}
}

func (g *Group) current() state {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.state
}

// waitingFor returns the names of the parts and checks that are not ready.
func (r *readiness) waitingFor(ctx context.Context) []string {
	r.turn <- struct{}{}
	defer func() { <-r.turn }()
	if !r.asked.IsZero() && time.Since(r.asked) < readyFor {
		return r.waiting
	}
	found := r.askAll(ctx)
	r.waiting = nil
	for _, name := range slices.Sorted(maps.Keys(found)) {
		if found[name] != nil {
			r.waiting = append(r.waiting, name)
		}
		r.note(ctx, name, found[name])
	}
	r.asked = time.Now()
	return r.waiting
}

// note logs a change.
func (r *readiness) note(ctx context.Context, name string, err error) {
	if r.unready[name] == (err != nil) {
		return
	}
	r.unready[name] = err != nil
	if err != nil {
		r.group.logger().WarnContext(ctx, "not ready", slog.String("name", name), slog.Any("error", err))
		return
	}
	r.group.logger().InfoContext(ctx, "ready", slog.String("name", name))
}

// askAll asks all at the same time: one that hangs says nothing about the others.
func (r *readiness) askAll(ctx context.Context) map[string]error {
	ctx, cancel := context.WithTimeout(ctx, readyTimeout)
	defer cancel()
	var mu sync.Mutex
	found := map[string]error{}
	var asking sync.WaitGroup
	ask := func(name string, ready func(context.Context) error) {
		asking.Go(func() {
			err := safely(ctx, ready)
			mu.Lock()
			defer mu.Unlock()
			found[name] = errors.Join(found[name], err) // a check may have the name of a part
		})
	}
	for name, check := range r.checks {
		ask(name, check)
	}
	for _, p := range r.group.parts() {
		ask(p.name, p.ready)
	}
	asking.Wait()
	return found
}

// safely turns a panic, which would end the process, into an error.
func safely(ctx context.Context, ask func(context.Context) error) (err error) {
	defer func() {
		if v := recover(); v != nil {
			err = fmt.Errorf("panic: %v", v)
		}
	}()
	return ask(ctx)
}
