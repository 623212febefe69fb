package ratelimitredis

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/ratelimit"
)

//go:embed common.lua
var commonSource string

//go:embed decide.lua
var decideSource string

//go:embed refund.lua
var refundSource string

const (
	argsPerLimit = 6

	// maxAsks bounds how often a script is asked again because the server is in
	// another window than the client thought. The first answer tells the time, so
	// a second miss needs a clock that jumps.
	maxAsks = 3

	// maxLag is how far the client keeps its idea of the server's clock behind what
	// it last learned: the declared windows reach further ahead than back.
	maxLag = 250 * time.Millisecond
)

var errDrift = errors.New("the server's clock jumps")

// ask runs a script with the keys of the charges, and args(window) for each,
// until the server is within the declared windows.
func (l *Limiter) ask(ctx context.Context, script *redis.Script, charges []ratelimit.Charge, head []any, args func(c ratelimit.Charge, window int64) []any) ([]int64, error) {
	for range maxAsks {
		keys := make([]string, 0, 3*len(charges))
		argv := append(make([]any, 0, len(head)+argsPerLimit*len(charges)), head...)
		for _, c := range charges {
			window := l.window(c.Limit)
			keys = l.appendKeys(keys, c, window)
			argv = append(argv, args(c, window)...)
		}
		reply, err := script.Run(ctx, l.client, keys, argv...).Int64Slice()
		if err != nil {
			return nil, err
		}
		if len(reply) < 2 {
			return nil, fmt.Errorf("script answered %d numbers", len(reply))
		}
		l.offset.Store(reply[0] - time.Now().UnixMilli())
		if reply[1] >= 0 {
			return reply, nil
		}
	}
	return nil, errDrift
}

// window is the number of the window that the server is in, or the one before.
func (l *Limiter) window(limit ratelimit.Limit) int64 {
	lag := min(maxLag, limit.Window/4).Milliseconds()
	return (time.Now().UnixMilli() + l.offset.Load() - lag) / limit.Window.Milliseconds()
}

// appendKeys declares the keys of one charge.
func (l *Limiter) appendKeys(keys []string, c ratelimit.Charge, window int64) []string {
	base := l.base + c.Limit.Name + ":"
	if c.Key != "" {
		base += ratelimit.EncodeKey(c.Key) + ":"
	}
	if c.Limit.Algorithm == ratelimit.TokenBucket {
		return append(keys, base+"b")
	}
	for m := window - 1; m <= window+1; m++ {
		keys = append(keys, base+strconv.FormatInt(m, 10))
	}
	return keys
}

func decideArgs(c ratelimit.Charge, window int64) []any {
	// A cost beyond the limit is denied whatever it is; this one is exact.
	cost := min(c.Cost, max(c.Limit.Max, c.Limit.Burst)+1)
	return []any{kind(c.Limit), c.Limit.Window.Milliseconds(), c.Limit.Max, c.Limit.Burst, cost, window}
}

func refundArgs(c ratelimit.Charge, window int64) []any {
	cost := min(c.Cost, max(c.Limit.Max, c.Limit.Burst))
	since := int64(0)
	if !c.At.IsZero() {
		since = c.At.UnixMilli()
	}
	if c.Limit.Algorithm == ratelimit.TokenBucket {
		cost = min(c.Cost, c.Limit.Burst) * c.Limit.Window.Milliseconds()
	}
	return []any{kind(c.Limit), c.Limit.Window.Milliseconds(), c.Limit.Max, cost, since, window}
}

func kind(l ratelimit.Limit) string {
	if l.Algorithm == ratelimit.TokenBucket {
		return "b"
	}
	return "w"
}
