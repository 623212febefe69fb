package ratelimit_test

import (
	"context"
	"net/http"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/ratelimit"
	"github.com/holdfast-go/holdfast/ratelimit/ratelimitredis"
)

// The code of README.md.

var _ = []any{limitedHandler, mailer}

func limitedHandler(client redis.UniversalClient, orders http.Handler) (http.Handler, error) {
	limiter, err := ratelimitredis.New(client, ratelimitredis.Config{})
	if err != nil {
		return nil, err
	}
	caller := ratelimit.HeaderKey("X-User-Id") // set by the authentication
	limited, err := ratelimit.NewMiddleware(limiter, func(r *http.Request) ([]ratelimit.Charge, error) {
		id, err := caller(r)
		return []ratelimit.Charge{
			{Limit: ratelimit.Limit{Name: "user", Max: 10}, Key: id}, // 10 a minute
			{Limit: ratelimit.Limit{Name: "global", Max: 1000}},      // no Key: one quota for all
		}, err
	}, ratelimit.MiddlewareConfig{})
	if err != nil {
		return nil, err
	}
	return limited(orders), nil
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
	return inbox.Handle(mux, "mail.requested", send, inbox.Blocking(turn)) // 100 a minute for all processes together
}
