package ratelimitredis_test

import (
	"context"
	"testing"

	"github.com/holdfast-go/holdfast/internal/redistest"
	"github.com/holdfast-go/holdfast/ratelimit"
	"github.com/holdfast-go/holdfast/ratelimit/ratelimitredis"
)

func BenchmarkRememberedDenial(b *testing.B) {
	l, err := ratelimitredis.New(redistest.New(b), ratelimitredis.Config{})
	if err != nil {
		b.Fatal(err)
	}
	ctx := context.Background()
	user := ratelimit.Limit{Name: "user", Max: 1, Window: day}
	for b.Loop() {
		if _, err := l.Allow(ctx, ratelimit.Charge{Limit: user, Key: "ann"}, ratelimit.Charge{Limit: global}); err != nil {
			b.Fatal(err)
		}
	}
}
