package httpapi

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"regexp"
	"slices"
	"sync"
	"time"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/ratelimit"
)

// releasing are the answers that free the key: the request took
// no effect, and the client may fix it or send it later.
var releasing = []int{
	http.StatusBadRequest, http.StatusNotFound, http.StatusMethodNotAllowed, http.StatusRequestEntityTooLarge,
	http.StatusUnsupportedMediaType, http.StatusTooManyRequests, http.StatusServiceUnavailable,
}

// newGuard returns the checks of every POST: user, rate limit, idempotency key.
func newGuard(cfg Config, log *seldom) (func(http.Handler) http.Handler, error) {
	if cfg.UserLimit < 1 || cfg.GlobalLimit < 0 {
		return nil, fmt.Errorf("httpapi: UserLimit is %d and GlobalLimit %d, want at least 1 and 0", cfg.UserLimit, cfg.GlobalLimit)
	}
	limited, err := newLimited(cfg)
	if err != nil {
		return nil, err
	}
	once, err := newOnce(cfg, log)
	if err != nil {
		return nil, err
	}
	return func(next http.Handler) http.Handler { return requireUser(limited(once(next))) }, nil
}

// leftOut is a layer that does nothing.
func leftOut(next http.Handler) http.Handler { return next }

func newLimited(cfg Config) (func(http.Handler) http.Handler, error) {
	if cfg.Limiter == nil {
		return leftOut, nil
	}
	return ratelimit.NewMiddleware(cfg.Limiter, charges(cfg.UserLimit, cfg.GlobalLimit), ratelimit.MiddlewareConfig{
		Logger: cfg.Logger,
	})
}

func newOnce(cfg Config, log *seldom) (func(http.Handler) http.Handler, error) {
	if cfg.Keys == nil {
		return leftOut, nil
	}
	return idempotency.NewMiddleware(cfg.Keys, idempotency.GlobalScope, idempotency.MiddlewareConfig{
		FingerprintParts: func(r *http.Request) []string { return []string{userOf(r.Context())} },
		Keep:             func(status int) bool { return !slices.Contains(releasing, status) },
		MaxRequestBytes:  maxBodyBytes,
		OnReplay:         func(r *http.Request) { refund(r.Context(), log) },
		Logger:           cfg.Logger,
	})
}

// Limits returns the limit of each user, and the limit of all users together.
func Limits(userLimit, globalLimit int) (user, global ratelimit.Limit) {
	return ratelimit.Limit{Name: "user", Max: int64(userLimit)}, ratelimit.Limit{Name: "global", Max: int64(globalLimit)}
}

// charges returns one unit of the user's limit and, if there is one, of the limit for all.
func charges(userLimit, globalLimit int) func(*http.Request) ([]ratelimit.Charge, error) {
	user, global := Limits(userLimit, globalLimit)
	return func(r *http.Request) ([]ratelimit.Charge, error) {
		list := []ratelimit.Charge{{Limit: user, Key: userOf(r.Context())}}
		if globalLimit > 0 {
			list = append(list, ratelimit.Charge{Limit: global})
		}
		return list, nil
	}
}

// refund refunds the unit of a replayed request: the shop did no work for it.
func refund(ctx context.Context, log *seldom) {
	if err := ratelimit.RefundFrom(ctx); err != nil {
		log.write(ctx, slog.LevelWarn, "refund of a replay failed", "refund", slog.Any("error", err))
	}
}

// UserHeader names the user. It is a mock: a real shop would check a credential here.
const UserHeader = "X-Mock-User-Id"

var userPattern = regexp.MustCompile(`^[A-Za-z0-9._-]{1,64}$`)

type userKey struct{}

func requireUser(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		values := r.Header.Values(UserHeader)
		if len(values) != 1 || !userPattern.MatchString(values[0]) {
			newProblem(http.StatusBadRequest, codeUserRequired,
				"header "+UserHeader+" must hold 1 to 64 of A-Z a-z 0-9 . _ -").write(w)
			return
		}
		next.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), userKey{}, values[0])))
	})
}

// userOf returns the user that requireUser has found.
func userOf(ctx context.Context) string {
	user, _ := ctx.Value(userKey{}).(string)
	return user
}

// seldomEvery is the time between two lines of one kind.
const seldomEvery = 30 * time.Second

// seldom logs a repeated fault once per seldomEvery, with the number of repeats. During an outage every
// request has the same fault.
type seldom struct {
	log *slog.Logger

	mu sync.Mutex
	// lines are the kinds that were logged in the last seldomEvery.
	lines map[string]*repeatedLine
}

// repeatedLine is the latest line that was not written, and the number of such lines.
type repeatedLine struct {
	repeats int
	write   func(repeats int)
}

func newSeldom(log *slog.Logger) *seldom {
	return &seldom{log: log, lines: map[string]*repeatedLine{}}
}

// write logs the first line of a kind at once, and the latest of the following ones after seldomEvery.
// The caller bounds the number of kinds.
func (s *seldom) write(ctx context.Context, level slog.Level, msg, kind string, attrs ...slog.Attr) {
	ctx = context.WithoutCancel(ctx)
	write := func(repeats int) {
		s.log.LogAttrs(ctx, level, msg, append(attrs, slog.Int("repeats", repeats))...)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if line, ok := s.lines[kind]; ok {
		line.repeats++
		line.write = write
		return
	}
	write(0)
	s.lines[kind] = &repeatedLine{}
	time.AfterFunc(seldomEvery, func() { s.conclude(kind) })
}

// conclude writes the held line of a kind. If there is none, the next line counts as a first one.
func (s *seldom) conclude(kind string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	line := s.lines[kind]
	if line.repeats == 0 {
		delete(s.lines, kind)
		return
	}
	line.write(line.repeats)
	s.lines[kind] = &repeatedLine{}
	time.AfterFunc(seldomEvery, func() { s.conclude(kind) })
}
