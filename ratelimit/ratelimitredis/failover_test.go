package ratelimitredis_test

import (
	"testing"

	"github.com/holdfast-go/holdfast/internal/redistest"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/ratelimit"
	"github.com/holdfast-go/holdfast/ratelimit/ratelimitredis"
)

// A replica that has taken over decides, though nobody refers the client to it.
func TestClusterFailover(t *testing.T) {
	t.Parallel()
	client, failOver := redistest.Failover(t)
	l := open(t, client, ratelimitredis.Config{})
	c := ratelimit.Charge{Limit: ratelimit.Limit{Name: "user", Max: 100, Window: day}, Key: "ann"}
	allow := func() error {
		_, err := l.Allow(t.Context(), c)
		return err
	}
	if err := allow(); err != nil {
		t.Fatal(err)
	}
	failOver()
	testenv.Eventually(t, allow)
}
