package service

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"strings"
	"sync"
	"time"
)

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
