package httpapi

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"slices"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/ratelimit"
)

// releasing are the answers after which a key is free again: the request took
// no effect, and the client may send it better or later.
var releasing = []int{
	http.StatusBadRequest, http.StatusNotFound, http.StatusMethodNotAllowed, http.StatusRequestEntityTooLarge,
	http.StatusUnsupportedMediaType, http.StatusTooManyRequests, http.StatusServiceUnavailable,
}

// newGuard returns what every POST passes: user, rate limit, idempotency key.
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

// leftOut is a layer that is not there.
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

// Limits are that of each user and that for all of them together.
func Limits(userLimit, globalLimit int) (user, global ratelimit.Limit) {
	return ratelimit.Limit{Name: "user", Max: int64(userLimit)}, ratelimit.Limit{Name: "global", Max: int64(globalLimit)}
}

// charges is one unit of the user's limit and, if there is one, of the limit for all.
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

// refund gives the unit of a replayed request back: the shop did no work for it.
func refund(ctx context.Context, log *seldom) {
	if err := ratelimit.RefundFrom(ctx); err != nil {
		log.write(ctx, slog.LevelWarn, "refund of a replay failed", "refund", slog.Any("error", err))
	}
}
