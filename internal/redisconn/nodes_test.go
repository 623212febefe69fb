package redisconn_test

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/internal/redisconn"
)

// cluster counts how often it is told to ask.
type cluster struct {
	redis.UniversalClient
	asked int
}

func (c *cluster) ReloadState(context.Context) { c.asked++ }

type answer struct{ error }

func (answer) RedisError() {}

func TestFailed(t *testing.T) {
	t.Parallel()
	given, cancel := context.WithCancel(t.Context())
	cancel()
	for _, c := range []struct {
		name string
		ctx  context.Context
		err  error
		want int
	}{
		{"no error", t.Context(), nil, 0},
		{"the server's answer", t.Context(), fmt.Errorf("script: %w", answer{errors.New("OOM")}), 0},
		{"no such key", t.Context(), redis.Nil, 0},
		{"a caller who gave up", given, context.Canceled, 0},
		{"no answer", t.Context(), errors.New("connection refused"), 1},
		{"no answer in time", t.Context(), context.DeadlineExceeded, 1},
	} {
		client := &cluster{}
		redisconn.Failed(c.ctx, client, c.err)
		if client.asked != c.want {
			t.Errorf("%s: it asks %d times, want %d", c.name, client.asked, c.want)
		}
	}
	alone := redis.NewClient(&redis.Options{})
	redisconn.Failed(t.Context(), alone, errors.New("connection refused")) // no Cluster
	if err := alone.Close(); err != nil {
		t.Error(err)
	}
}
