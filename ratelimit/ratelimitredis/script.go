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

//go:embed reset.lua
var resetSource string

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

// script is a script and its name on the server.
type script struct{ source, sha string }

func newScript(source string) script {
	source = commonSource + source
	return script{source, redis.NewScript(source).Hash()}
}

// scriptArgs appends the arguments for one charge.
type scriptArgs func(argv []any, c ratelimit.Charge, window int64) []any

// ask runs a script with the keys of the charges, and args(window) for each,
// until the server is within the declared windows.
func (l *Limiter) ask(ctx context.Context, s script, base string, charges []ratelimit.Charge, head []any, args scriptArgs) ([]int64, error) {
	timer := time.NewTimer(l.cfg.Timeout)
	defer timer.Stop()
	for range maxAsks {
		argv := make([]any, 3, 3+3*len(charges)+len(head)+argsPerLimit*len(charges))
		argv[0], argv[1] = "evalsha", s.sha
		now := time.Now().UnixMilli() + l.offset.Load()
		for _, c := range charges {
			argv = appendKeys(argv, base, c, window(c.Limit, now))
		}
		argv[2] = len(argv) - 3
		argv = append(argv, head...)
		for _, c := range charges {
			argv = args(argv, c, window(c.Limit, now))
		}
		reply, err := l.lanes.do(ctx, timer.C, s.source, argv)
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
		l.meters.drift.Add(ctx, 1)
	}
	return nil, errDrift
}

// window is the number of the window that the server is in, or the one before.
func window(limit ratelimit.Limit, now int64) int64 {
	lag := min(maxLag, limit.Window/4).Milliseconds()
	return (now - lag) / limit.Window.Milliseconds()
}

// appendKeys declares the keys of one charge.
func appendKeys(argv []any, base string, c ratelimit.Charge, window int64) []any {
	name := base + c.Limit.Name + ":"
	if c.Key != "" {
		name += ratelimit.EncodeKey(c.Key) + ":"
	}
	if c.Limit.Algorithm == ratelimit.TokenBucket {
		return append(argv, name+"b")
	}
	for m := window - 1; m <= window+1; m++ {
		argv = append(argv, name+strconv.FormatInt(m, 10))
	}
	return argv
}

func decideArgs(argv []any, c ratelimit.Charge, window int64) []any {
	// A cost beyond the limit is denied whatever it is; this one is exact.
	cost := min(c.Cost, max(c.Limit.Max, c.Limit.Burst)+1)
	return append(argv, kind(c.Limit), c.Limit.Window.Milliseconds(), c.Limit.Max, c.Limit.Burst, cost, window)
}

func refundArgs(argv []any, c ratelimit.Charge, window int64) []any {
	cost := min(c.Cost, max(c.Limit.Max, c.Limit.Burst))
	since := int64(0)
	if !c.At.IsZero() {
		since = c.At.UnixMilli()
	}
	if c.Limit.Algorithm == ratelimit.TokenBucket {
		cost = min(c.Cost, c.Limit.Burst) * c.Limit.Window.Milliseconds()
	}
	return append(argv, kind(c.Limit), c.Limit.Window.Milliseconds(), c.Limit.Max, cost, since, window)
}

func kind(l ratelimit.Limit) string {
	switch l.Algorithm {
	case ratelimit.TokenBucket:
		return "b"
	case ratelimit.FixedWindow:
		return "f"
	}
	return "w"
}
