package ratelimitredis

import (
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
	"go.opentelemetry.io/otel/metric"
)

// Config configures a Limiter. The zero value works.
type Config struct {
	// Prefix begins every key: 1 to 64 of [A-Za-z0-9._:-]. Default: "rate_limit".
	Prefix string

	// Tag puts every key into the cluster slot of the hash tag {Tag}: 1 to 32 of [A-Za-z0-9._-].
	// Default: none; "rl" on a cluster or ring client, which cannot decide about several keys without
	// one.
	Tag string

	// Timeout bounds a call, whatever the client's own timeouts and retries are. With a client whose
	// ContextTimeoutEnabled is set, a call that waits for no other is made by the goroutine that
	// asks, which is faster; it then ends with the timeout or the deadline of its context, not when
	// that is cancelled. Default: 1 s, ten times the period after which a container that has used up its
	// share of the CPU runs again. What a silent Redis costs is bounded by the five failures after which
	// nobody waits for it.
	Timeout time.Duration

	// DenyCache is how many denials are remembered, at least 64: each until Redis would admit it, for
	// a second at most, so that a flood of denied requests costs one round trip a second. What is
	// remembered is denied during an outage as well. -1 remembers none. Default: 10,000.
	DenyCache int

	// FailOpen lets requests pass uncounted while Redis cannot be asked. Not together with Replicas.
	// Default: such requests get ratelimit.ErrUnavailable, which the middleware answers with 503.
	FailOpen bool

	// Replicas, if above 0, has requests counted within the process while Redis cannot be asked: with
	// every limit divided by this number of processes, but at least one unit, and without what Redis
	// has counted. A request that costs more than this share is denied until Redis can be asked.
	// Default: none is.
	Replicas int

	// Logger receives the beginning and the end of an outage that decides. Default: slog.Default().
	Logger *slog.Logger
	// MeterProvider is for the metrics holdfast.ratelimit.*. Default: the global one.
	MeterProvider metric.MeterProvider
}

func (c Config) withDefaults(client redis.UniversalClient) Config {
	if c.Prefix == "" {
		c.Prefix = "rate_limit"
	}
	if c.Timeout == 0 {
		c.Timeout = time.Second
	}
	if c.DenyCache == 0 {
		c.DenyCache = 10_000
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	_, cluster := client.(*redis.ClusterClient)
	_, ring := client.(*redis.Ring)
	if c.Tag == "" && (cluster || ring) {
		c.Tag = "rl"
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
	if c.DenyCache != -1 && c.DenyCache < 64 {
		errs = append(errs, fmt.Errorf("ratelimitredis: Config.DenyCache is %d, must be at least 64, or -1", c.DenyCache))
	}
	if c.Replicas < 0 {
		errs = append(errs, fmt.Errorf("ratelimitredis: Config.Replicas is %d, must not be negative", c.Replicas))
	}
	if c.FailOpen && c.Replicas > 0 {
		errs = append(errs, errors.New("ratelimitredis: Config has both FailOpen and Replicas"))
	}
	return errors.Join(errs...)
}

// base is how the keys begin.
func (c Config) base() string {
	if c.Tag == "" {
		return c.Prefix + ":"
	}
	return c.Prefix + ":{" + c.Tag + "}:"
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
