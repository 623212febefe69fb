package ratelimitredis_test

import (
	"crypto/rand"
	"testing"

	"github.com/holdfast-go/holdfast/internal/redistest"
	"github.com/holdfast-go/holdfast/ratelimit/ratelimitredis"
	"github.com/holdfast-go/holdfast/ratelimit/ratelimittest/conformance"
)

func TestOnCluster(t *testing.T) {
	t.Parallel()
	client, _ := redistest.Cluster(t)
	t.Run("Conformance", func(t *testing.T) {
		conformance.Test(t, func(t *testing.T) conformance.Limiter {
			return open(t, client, ratelimitredis.Config{Prefix: "test:" + rand.Text()})
		}, func(t *testing.T, body func(t *testing.T)) { body(t) })
	})
	t.Run("Schedules", func(t *testing.T) { testSchedules(t, client) })
}
