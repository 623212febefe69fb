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
	// Allow lets the request pass.
	Allow
	// Local counts within the process, with every limit divided by Config.Replicas,
	// and knows nothing of what Redis has counted. A request that costs more than
	// this share is denied until Redis can be asked.
	Local
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

	// Shards spreads the keys over that many tags, {Tag0}, {Tag1} …, and so over the
	// nodes of a cluster: 2 to 1024. The key of a charge chooses the shard, and each
	// shard has its part of the limits without a key: never more is admitted than
	// they say, less where the keys are spread unevenly. A decision then needs
	// exactly one key. 0 means one tag for all, which is exact.
	Shards int

	// Timeout bounds a call, whatever the client's own timeouts and retries are. 0
	// means 100 ms. With a client whose ContextTimeoutEnabled is set, a call that
	// waits for no other is made by the goroutine that asks, which is faster; it
	// then ends with the timeout or the deadline of its context, not when that is
	// cancelled.
	Timeout time.Duration

	// Pipelines is how many calls to Redis, or to each of Shards, may be under way
	// at once, at most 1000; decisions that are asked for meanwhile travel together
	// in the next one. 0 means 2.
	Pipelines int

	// DenyCache is how many denials are remembered, at least 64: each until Redis
	// would admit it, for a second at most, so that a flood of denied requests costs
	// one round trip a second. 0 means 10,000, -1 none. What is remembered is denied
	// during an outage as well, whatever the policy. See ratelimit.DenyCache for what
	// it does not see.
	DenyCache int

	// OnUnavailable is the policy when Redis cannot be asked in time. The zero value
	// is Deny.
	OnUnavailable Policy

	// Replicas is the number of processes among which the policy Local divides each
	// limit, at least one unit for each. 0 means 1.
	Replicas int

	// ProbeEvery is how often a Redis that has failed to answer five times in a row
	// is asked again; the policy decides about everything between. 0 means 1 s.
	ProbeEvery time.Duration

	Logger        *slog.Logger         // nil means slog.Default()
	MeterProvider metric.MeterProvider // nil means the global one
	Hooks         Hooks                // optional callbacks
}

// Hooks are optional callbacks, called by the goroutine that asked.
type Hooks struct {
	// OnDecision is called for every decision of Allow and Reserve, with the time it
	// took.
	OnDecision func(ctx context.Context, d ratelimit.Decision, took time.Duration)
	// OnUnavailable is called when Redis could not be asked.
	OnUnavailable func(ctx context.Context, err error)
}

const maxShards = 1024

func (c Config) withDefaults(client redis.UniversalClient) Config {
	if c.Prefix == "" {
		c.Prefix = "rate_limit"
	}
	if c.Timeout == 0 {
		c.Timeout = 100 * time.Millisecond
	}
	if c.Pipelines == 0 {
		c.Pipelines = 2
	}
	if c.DenyCache == 0 {
		c.DenyCache = 10_000
	}
	if c.Replicas == 0 {
		c.Replicas = 1
	}
	if c.ProbeEvery == 0 {
		c.ProbeEvery = time.Second
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	_, cluster := client.(*redis.ClusterClient)
	_, ring := client.(*redis.Ring)
	if c.Tag == "" && (cluster || ring || c.Shards > 0) {
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
	if c.Shards != 0 && (c.Shards < 2 || c.Shards > maxShards) {
		errs = append(errs, fmt.Errorf("ratelimitredis: Config.Shards is %d, must be 0 or 2 to %d", c.Shards, maxShards))
	}
	if c.Pipelines < 1 || c.Pipelines > 1000 {
		errs = append(errs, fmt.Errorf("ratelimitredis: Config.Pipelines is %d, must lie between 1 and 1000", c.Pipelines))
	}
	if c.DenyCache != -1 && c.DenyCache < 64 {
		errs = append(errs, fmt.Errorf("ratelimitredis: Config.DenyCache is %d, must be at least 64, or -1", c.DenyCache))
	}
	if c.Replicas < 1 {
		errs = append(errs, fmt.Errorf("ratelimitredis: Config.Replicas is %d, must be at least 1", c.Replicas))
	}
	if c.ProbeEvery < time.Millisecond {
		errs = append(errs, fmt.Errorf("ratelimitredis: Config.ProbeEvery is %v, must be at least 1ms", c.ProbeEvery))
	}
	if c.OnUnavailable > Local {
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
