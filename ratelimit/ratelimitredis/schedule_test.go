package ratelimitredis_test

import (
	"crypto/rand"
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/internal/redistest"
	"github.com/holdfast-go/holdfast/ratelimit/ratelimitredis"
	"github.com/holdfast-go/holdfast/ratelimit/ratelimittest/conformance"
)

func testSchedules(t *testing.T, client redis.UniversalClient) {
	t.Helper()
	l, advance := ratelimitredis.NewWithClock(t, client, ratelimitredis.Config{Prefix: "test:" + rand.Text(), Timeout: patient})
	conformance.TestSchedules(t, l, advance, 300)
}

func TestSchedules(t *testing.T) {
	t.Parallel()
	testSchedules(t, redistest.New(t))
}

func TestClockSetBack(t *testing.T) {
	t.Parallel()
	l, advance := ratelimitredis.NewWithClock(t, redistest.New(t), ratelimitredis.Config{Timeout: patient})
	conformance.TestClockSetBack(t, l, advance)
}
