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
	// readyFor is how long an answer is reused. It bounds the cost of probes, however many there are.
	readyFor = time.Second
)

// Ready returns a handler for readiness probes. It answers 200 while Run runs, every part is ready and every check
// returns nil. Otherwise it answers 503 with the names of parts and checks that are not ready. During the shutdown
// it answers 503. The checks test the servers that requests need, by name: "postgres": pool.Ping. An API that writes
// to an outbox needs no check of the broker. A liveness probe must not use this handler.
//
// Parts and checks are asked at the same time and have 2 s. The answer is reused for 1 s for all callers. Errors go
// to the log, one line per change; the answer has only names, as JSON. A check must return when its context ends.
// The handler is safe for concurrent use.
func (g *Group) Ready(checks map[string]func(context.Context) error) http.Handler {
	return &readiness{group: g, checks: maps.Clone(checks), unready: map[string]bool{}, turn: make(chan struct{}, 1)}
}

type readiness struct {
	group  *Group
	checks map[string]func(context.Context) error

	turn    chan struct{} // full while a goroutine uses the fields below
	asked   time.Time
	waiting []string        // names that were not ready, sorted
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
	_, _ = w.Write(body) // the prober may have left
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

// note logs a change of readiness.
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

// askAll asks all at the same time, so that one that hangs does not delay the others.
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

// safely converts a panic, which would end the process, to an error.
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
	// refusedFor is how long a server may reject the client. Its user or database may be about to be created.
	refusedFor = 5 * time.Second
)

// Prepare tries the steps one after the other, each until it succeeds: migrations, declarations, pings. name is
// the server that they need, for logs and errors. A step must return when its context ends, and may be called
// several times.
//
// It returns an error when ctx ends, with the cause of that end and the last failure, or when a server has rejected
// the client for 5 s, as the package documentation describes.
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

	mu       sync.Mutex // the goroutine of report reads the fields below
	failures int
	last     error
}

func (w *wait) lasted() time.Duration { return time.Since(w.began).Round(100 * time.Millisecond) }

// insist tries one step until it succeeds.
func (w *wait) insist(ctx context.Context, step func(context.Context) error) error {
	var refused time.Time // start of the rejections
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

// gaveUp returns the error after ctx has ended. A step that was interrupted only has the error of ctx, so the failure
// before it is used.
func (w *wait) gaveUp(ctx context.Context, err error) error {
	if w.last != nil && errors.Is(err, ctx.Err()) {
		err = w.last
	}
	return fmt.Errorf("gave up after %v: %w: %w", w.lasted(), context.Cause(ctx), err)
}

// fail records a failure, and logs the first one.
func (w *wait) fail(ctx context.Context, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.failures++
	w.last = err
	if w.failures == 1 {
		w.log.WarnContext(ctx, "preparation failed; trying again", slog.String("name", w.name), slog.Any("error", err))
	}
}

// report logs while the wait lasts, also if a step hangs, until stop returns.
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

// refusals are parts of the error texts of RabbitMQ and Redis, whose clients have no method for it.
var refusals = []string{
	"Exception (403)", "NOT_ALLOWED - vhost", "AMQP scheme must be", // user, password or right; no such vhost; no address
	"WRONGPASS ", "NOAUTH ", "NOPERM ",
}

// refusal reports whether a server answered and rejected the client, or an address cannot be parsed. Another attempt
// only helps if somebody changes a setting.
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
