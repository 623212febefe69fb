package ratelimitredis

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
	"go.opentelemetry.io/otel/metric"

	"github.com/holdfast-go/holdfast/ratelimit"
)

// Policy says what happens to a request when Redis cannot be asked.
type Policy uint8

const (
	// Deny returns ratelimit.ErrUnavailable, which the middleware answers with 503.
	Deny Policy = iota
	// Allow lets the request pass, with Decision.Unmetered set.
	Allow
)

// Config configures a Limiter. The zero value works.
type Config struct {
	// Prefix begins every key: 1 to 64 of [A-Za-z0-9._:-]. Empty means
	// "rate_limit".
	Prefix string

	// Tag puts every key into the cluster slot of the hash tag {Tag}: 1 to 32 of
	// [A-Za-z0-9._-]. Empty means none, and "rl" on a cluster or ring client, which
	// cannot decide about several keys without it.
	Tag string

	// Timeout bounds a call, whatever the client's own timeouts and retries are. 0
	// means 100 ms.
	Timeout time.Duration

	// OnUnavailable is the policy when Redis cannot be asked in time. The zero value
	// is Deny.
	OnUnavailable Policy

	Logger        *slog.Logger         // nil means slog.Default()
	MeterProvider metric.MeterProvider // nil means the global one
	Hooks         Hooks                // optional callbacks
}

// Hooks are optional callbacks, called by the goroutine that asked.
type Hooks struct {
	// OnDecision is called for every decision of Allow and Reserve.
	OnDecision func(ctx context.Context, d ratelimit.Decision)
	// OnUnavailable is called when Redis could not be asked.
	OnUnavailable func(ctx context.Context, err error)
}

func (c Config) withDefaults(client redis.UniversalClient) Config {
	if c.Prefix == "" {
		c.Prefix = "rate_limit"
	}
	if c.Timeout == 0 {
		c.Timeout = 100 * time.Millisecond
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	switch client.(type) {
	case *redis.ClusterClient, *redis.Ring:
		if c.Tag == "" {
			c.Tag = "rl"
		}
	}
	return c
}

func (c Config) validate() error {
	var errs []error
	if !plain(c.Prefix, 64, "._-:") {
		errs = append(errs, fmt.Errorf("ratelimitredis: Config.Prefix %.70q: want 1 to 64 of [A-Za-z0-9._:-]", c.Prefix))
	}
	if c.Tag != "" && !plain(c.Tag, 32, "._-") {
		errs = append(errs, fmt.Errorf("ratelimitredis: Config.Tag %.40q: want 1 to 32 of [A-Za-z0-9._-]", c.Tag))
	}
	if c.Timeout < time.Millisecond {
		errs = append(errs, fmt.Errorf("ratelimitredis: Config.Timeout is %v, must be at least 1ms", c.Timeout))
	}
	if c.OnUnavailable > Allow {
		errs = append(errs, fmt.Errorf("ratelimitredis: Config.OnUnavailable %d is unknown", c.OnUnavailable))
	}
	return errors.Join(errs...)
}

func plain(s string, most int, also string) bool {
	if s == "" || len(s) > most {
		return false
	}
	for i := range len(s) {
		c := s[i]
		letter := c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9'
		if !letter && strings.IndexByte(also, c) < 0 {
			return false
		}
	}
	return true
}
