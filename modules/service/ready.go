package service

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strings"
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

const (
	// The pauses between two attempts double, from the first to the longest.
	firstPause   = 100 * time.Millisecond
	longestPause = 2 * time.Second
	// reportEvery is the time between two lines about one wait.
	reportEvery = 10 * time.Second
	// refusedFor is how long a server may refuse. It may be about to get the user or the database that it lacks.
	refusedFor = 5 * time.Second
)

// Prepare tries the steps, one after the other, each until it succeeds: migrations, declarations, pings. name is
// the server that they need; it appears in logs and errors. A step must end when its context does, and must bear
// being repeated.
//
// It returns an error when ctx ends, with the cause of that end and the last failure, or when a server has refused
// for 5 s. The package documentation says what a refusal is.
func (g *Group) Prepare(ctx context.Context, name string, steps ...func(context.Context) error) error {
	if err := g.prepare(ctx, name, steps); err != nil {
		return fmt.Errorf("service: %s: %w", name, err)
	}
	return nil
}

func (g *Group) prepare(ctx context.Context, name string, steps []func(context.Context) error) error {
	if len(steps) == 0 {
		return nil
	}
	w := &wait{name: name, log: g.logger(), began: time.Now()}
	stop := w.report(ctx)
	defer stop()
	for _, step := range steps {
		if err := w.insist(ctx, step); err != nil {
			return err
		}
	}
	if w.failures > 0 {
		w.log.InfoContext(ctx, "preparation succeeded", slog.String("name", name), slog.Int("failures", w.failures), slog.Duration("waited", w.lasted()))
	}
	return nil
}

// wait is the wait for one server.
type wait struct {
	name  string
	log   *slog.Logger
	began time.Time

	mu       sync.Mutex // the goroutine that reports reads what the other writes
	failures int
	last     error
}

func (w *wait) lasted() time.Duration { return time.Since(w.began).Round(100 * time.Millisecond) }

// insist tries one step until it succeeds.
func (w *wait) insist(ctx context.Context, step func(context.Context) error) error {
	var refused time.Time // since when
	for pause := firstPause; ; pause = min(2*pause, longestPause) {
		err := step(ctx)
		if err == nil {
			return nil
		}
		if ctx.Err() != nil {
			return w.gaveUp(ctx, err)
		}
		w.fail(ctx, err)
		switch {
		case !refusal(err):
			refused = time.Time{}
		case refused.IsZero():
			refused = time.Now()
		case time.Since(refused) >= refusedFor:
			return fmt.Errorf("refused: %w", err)
		}
		timer := time.NewTimer(pause)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return w.gaveUp(ctx, err)
		}
	}
}

// gaveUp is the error when ctx has ended. A step that was cut short failed for that reason, so the failure before
// it says more.
func (w *wait) gaveUp(ctx context.Context, err error) error {
	if w.last != nil && errors.Is(err, ctx.Err()) {
		err = w.last
	}
	return fmt.Errorf("gave up after %v: %w: %w", w.lasted(), context.Cause(ctx), err)
}

// fail notes a failure, and logs the first.
func (w *wait) fail(ctx context.Context, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.failures++
	w.last = err
	if w.failures == 1 {
		w.log.WarnContext(ctx, "preparation failed; trying again", slog.String("name", w.name), slog.Any("error", err))
	}
}

// report logs in a while that the wait lasts, also when a step hangs, until stop returns.
func (w *wait) report(ctx context.Context) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	var reporting sync.WaitGroup
	reporting.Go(func() {
		ticker := time.NewTicker(reportEvery)
		defer ticker.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-ticker.C:
				w.stillWaiting(ctx)
			}
		}
	})
	return func() {
		cancel()
		reporting.Wait()
	}
}

func (w *wait) stillWaiting(ctx context.Context) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.log.WarnContext(ctx, "still preparing", slog.String("name", w.name),
		slog.Duration("waited", w.lasted()), slog.Int("failures", w.failures), slog.Any("error", w.last))
}

// refusals are parts of the messages of RabbitMQ and Redis, whose clients have no method that tells.
var refusals = []string{
	"Exception (403)", "NOT_ALLOWED - vhost", "AMQP scheme must be", // user, password or right; no such vhost; no address
	"WRONGPASS ", "NOAUTH ", "NOPERM ",
}

// refusal reports whether a server answered and refused, or an address cannot be read, so that trying again helps
// only if somebody changes a setting.
func refusal(err error) bool {
	var answer interface {
		error
		SQLState() string
	}
	if errors.As(err, &answer) {
		code := answer.SQLState()
		return strings.HasPrefix(code, "28") || code == "3D000" || code == "42501" // login, database, right
	}
	if address, ok := errors.AsType[*url.Error](err); ok && address.Op == "parse" {
		return true
	}
	for _, text := range refusals {
		if strings.Contains(err.Error(), text) {
			return true
		}
	}
	return false
}
