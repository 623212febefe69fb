package ratelimit_test

import (
	"context"
	"log/slog"
	"net/http"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/ratelimit"
	"github.com/holdfast-go/holdfast/ratelimit/ratelimitredis"
)

// The code of README.md.

var _ = []any{limitedHandler, (*shop).charges, mailer, budget, trial, ahead}

func limitedHandler(client redis.UniversalClient, orders http.Handler) (http.Handler, error) {
	limiter, err := ratelimitredis.New(client, ratelimitredis.Config{})
	if err != nil {
		return nil, err
	}
	caller := ratelimit.HeaderKey("X-User-Id") // as authentication leaves it
	limited, err := ratelimit.NewMiddleware(limiter, func(r *http.Request) ([]ratelimit.Charge, error) {
		id, err := caller(r)
		return []ratelimit.Charge{
			{Limit: ratelimit.Limit{Name: "user", Max: 10}, Key: id},
			{Limit: ratelimit.Limit{Name: "global", Max: 1000}},
		}, err
	}, ratelimit.MiddlewareConfig{})
	if err != nil {
		return nil, err
	}
	return limited(orders), nil
}

type shop struct {
	address func(*http.Request) (string, error) // of ratelimit.ClientIP
	planOf  func(*http.Request) (id string, paid bool)
}

func (s *shop) charges(r *http.Request) ([]ratelimit.Charge, error) {
	if r.Method == http.MethodGet {
		return nil, nil // free
	}
	ip, err := s.address(r)
	if err != nil {
		return nil, err
	}
	id, paid := s.planOf(r)
	user := ratelimit.Limit{Name: "user", Max: 10}
	if paid {
		user.Max = 100 // counts on from what was charged at 10
	}
	c := ratelimit.Charge{Limit: user, Key: id}
	if r.URL.Path == "/export" {
		c.Cost = 5
	}
	return []ratelimit.Charge{c, {Limit: ratelimit.Limit{Name: "ip", Max: 60}, Key: ip}}, nil
}

type mail struct {
	To string `json:"to"`
}

func mailer(limiter ratelimit.Limiter, mux *inbox.Mux, send func(context.Context, mail) error) error {
	perMinute := ratelimit.Limit{Name: "mail", Max: 100, Algorithm: ratelimit.TokenBucket, Burst: 5}
	turn, err := ratelimit.NewWaiter(limiter, []ratelimit.Charge{{Limit: perMinute}}, ratelimit.WaiterConfig{})
	if err != nil {
		return err
	}
	return inbox.Handle(mux, "mail.requested", send, inbox.Blocking(turn)) // 100 a minute over all processes
}

func budget(ctx context.Context, limiter ratelimit.Limiter, account string) error {
	d, err := limiter.Allow(ctx, ratelimit.Charge{Limit: ratelimit.Limit{Name: "exports", Max: 3, Window: 24 * time.Hour}, Key: account})
	if err != nil {
		return err
	}
	return d.Err() // nil, or 429 RATE_LIMITED with RetryAfter
}

func trial(limiter ratelimit.Limiter, charges func(*http.Request) ([]ratelimit.Charge, error)) (func(http.Handler) http.Handler, error) {
	return ratelimit.NewMiddleware(limiter, charges, ratelimit.MiddlewareConfig{
		Shadow: func(r *http.Request, d ratelimit.Decision) {
			slog.InfoContext(r.Context(), "would be denied", "limit", d.Denied)
		},
	})
}

func ahead(ctx context.Context, limiter *ratelimitredis.Limiter, ended chan<- error) error {
	leased, err := ratelimit.NewLeased(limiter, ratelimit.LeasedConfig{})
	if err != nil {
		return err
	}
	go func() { ended <- leased.Run(ctx) }() // gives back; all of it when ctx ends
	_, err = leased.Allow(ctx, ratelimit.Charge{Limit: ratelimit.Limit{Name: "global", Max: 100_000}})
	return err
}
