package ratelimitredis

import (
	_ "embed"
	"encoding/binary"
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

// maxLag is how far the client keeps its idea of the server's clock behind what
// it last learned: the declared windows reach further ahead than back.
const maxLag = 250 * time.Millisecond

// script is a script and its name on the server.
type script struct{ source, sha string }

func newScript(source string) *script {
	source = commonSource + source
	return &script{source, redis.NewScript(source).Hash()}
}

// window is the number of the window that the server is in, or the one before.
func window(limit ratelimit.Limit, now int64) int64 {
	lag := min(maxLag, limit.Window/4).Milliseconds()
	return (now - lag) / limit.Window.Milliseconds()
}

// appendKeys declares the keys of one counter, whose name all begin with. A
// bucket's tells its window, for its value is in units of that.
func appendKeys(args []any, name string, limit ratelimit.Limit, window, count int64) []any {
	if limit.Algorithm == ratelimit.TokenBucket {
		return append(args, name+"b"+strconv.FormatInt(limit.Window.Milliseconds(), 10))
	}
	for m := window - 1; m < window-1+count; m++ {
		args = append(args, name+strconv.FormatInt(m, 10))
	}
	return args
}

// nameOf is how the keys of a charge's counter begin.
func nameOf(base string, c ratelimit.Charge) string {
	if c.Key == "" {
		return base + c.Limit.Name + ":"
	}
	return base + c.Limit.Name + ":" + ratelimit.EncodeKey(c.Key) + ":"
}

// decideArgs are the keys and arguments of decide.lua for several questions.
func decideArgs(calls []*call, now int64) []any {
	b := bundle{keys: make([]any, 1, 2+6*len(calls)), now: now, known: make(map[counterName]int, 2*len(calls))}
	for _, c := range calls {
		take := int64(0)
		if c.take {
			take = 1
		}
		b.questions = append(b.questions, take, c.within, int64(len(c.charges)))
		for _, charge := range c.charges {
			// A cost beyond the limit is denied whatever it is; this one is exact.
			cost := min(charge.Cost, max(charge.Limit.Max, charge.Limit.Burst)+1)
			rule := b.rule(charge.Limit)
			b.questions = append(b.questions, int64(rule), int64(b.counter(c.base, charge, rule)), cost)
		}
	}
	b.keys[0] = len(b.keys) - 1
	return append(b.keys, b.pack())
}

// bundle gathers questions; rules and counters are counted from 1, as Lua does.
type bundle struct {
	now       int64
	keys      []any
	rules     []redisRule
	counters  []int64 // their rules, or ones like them but for Max
	questions []int64
	known     map[counterName]int
}

type redisRule struct {
	limit  ratelimit.Limit
	window int64 // m0
	keys   int64 // of each counter
}

type counterName struct {
	rule int
	key  string
}

func (b *bundle) rule(limit ratelimit.Limit) int {
	for i := range b.rules {
		if b.rules[i].limit == limit {
			return i + 1
		}
	}
	r := redisRule{limit: limit, window: window(limit, b.now), keys: 3}
	switch {
	case limit.Algorithm == ratelimit.TokenBucket:
		r.keys = 1
	case window(limit, b.now+2*maxLag.Milliseconds()) == r.window: // far from either end of the window
		r.keys = 2
	}
	b.rules = append(b.rules, r)
	return len(b.rules)
}

func (b *bundle) counter(base string, c ratelimit.Charge, rule int) int {
	name := counterName{b.first(rule), c.Key}
	if at := b.known[name]; at > 0 {
		return at
	}
	b.counters = append(b.counters, int64(rule))
	b.known[name] = len(b.counters)
	r := b.rules[rule-1]
	b.keys = appendKeys(b.keys, nameOf(base, c), c.Limit, r.window, r.keys)
	return len(b.counters)
}

// first is the first of the rules that count together with one, as plans do that
// differ in Max alone.
func (b *bundle) first(rule int) int {
	l := b.rules[rule-1].limit
	for i := range b.rules[:rule] {
		o := b.rules[i].limit
		if o.Name == l.Name && o.Window == l.Window && (o.Algorithm == ratelimit.TokenBucket) == (l.Algorithm == ratelimit.TokenBucket) {
			return i + 1
		}
	}
	return rule
}

// pack is the msgpack array that decide.lua reads.
func (b *bundle) pack() []byte {
	n := 2 + 6*len(b.rules) + len(b.counters) + len(b.questions)
	out := make([]byte, 0, 5+3*n)
	out = binary.BigEndian.AppendUint32(append(out, 0xdd), uint32(n))
	out = appendInt(out, int64(len(b.rules)))
	for _, r := range b.rules {
		for _, v := range []int64{kind(r.limit), r.limit.Window.Milliseconds(), r.limit.Max, r.limit.Burst, r.window, r.keys} {
			out = appendInt(out, v)
		}
	}
	out = appendInt(out, int64(len(b.counters)))
	for _, v := range b.counters {
		out = appendInt(out, v)
	}
	for _, v := range b.questions {
		out = appendInt(out, v)
	}
	return out
}

func appendInt(out []byte, v int64) []byte {
	if 0 <= v && v < 128 {
		return append(out, byte(v))
	}
	return binary.BigEndian.AppendUint64(append(out, 0xd3), uint64(v))
}

// refundArgs are the keys and arguments of refund.lua and reset.lua.
func refundArgs(c *call, now int64) []any {
	args := make([]any, 1, 1+9*len(c.charges))
	for _, charge := range c.charges {
		args = appendKeys(args, nameOf(c.base, charge), charge.Limit, window(charge.Limit, now), 3)
	}
	args[0] = len(args) - 1
	for _, charge := range c.charges {
		l := charge.Limit
		cost := min(charge.Cost, max(l.Max, l.Burst))
		since := int64(0)
		if !charge.At.IsZero() {
			since = charge.At.UnixMilli()
		}
		if l.Algorithm == ratelimit.TokenBucket {
			cost = min(charge.Cost, l.Burst) * l.Window.Milliseconds()
		}
		args = append(args, kind(l), l.Window.Milliseconds(), l.Max, cost, since, window(l, now))
	}
	return args
}

// kind is how the scripts call an algorithm.
func kind(l ratelimit.Limit) int64 {
	switch l.Algorithm {
	case ratelimit.TokenBucket:
		return 2
	case ratelimit.FixedWindow:
		return 1
	}
	return 0
}
