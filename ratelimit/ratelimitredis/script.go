package ratelimitredis

import (
	"context"
	_ "embed"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/ratelimit"
	"github.com/holdfast-go/holdfast/ratelimit/driver"
)

//go:embed common.lua
var commonSource string

//go:embed decide.lua
var decideSource string

//go:embed refund.lua
var refundSource string

//go:embed reset.lua
var resetSource string

// maxLag is subtracted from the estimate of the server's clock, because the declared windows reach further ahead than
// back.
const maxLag = 250 * time.Millisecond

// script is a script and its SHA-1 on the server.
type script struct{ source, sha string }

func newScript(source string) *script {
	source = commonSource + source
	return &script{source, redis.NewScript(source).Hash()}
}

// window returns the number of the server's current window, or of the one before it.
func window(limit ratelimit.Limit, now int64) int64 {
	lag := min(maxLag, limit.Window/4).Milliseconds()
	return (now - lag) / limit.Window.Milliseconds()
}

// keys are the keys of a command, in one text: a string for each key would cost as much as all other allocations for
// it.
type keys struct {
	text []byte
	ends []int // of the keys in text
}

// add declares the keys of one counter. A bucket's key contains its window, because its value is in units of the
// window.
func (k *keys) add(base string, c ratelimit.Charge, window, count int64) {
	begin := len(k.text)
	k.text = appendName(k.text, base, c)
	if c.Limit.Algorithm == ratelimit.TokenBucket {
		k.text = strconv.AppendInt(append(k.text, 'b'), c.Limit.Window.Milliseconds(), 10)
		k.ends = append(k.ends, len(k.text))
		return
	}
	named := len(k.text)
	for m := window - 1; m < window-1+count; m++ {
		if m >= window {
			k.text = append(k.text, k.text[begin:named]...)
		}
		k.text = strconv.AppendInt(k.text, m, 10)
		k.ends = append(k.ends, len(k.text))
	}
}

// appendTo appends the number of the keys and the keys to the arguments of a command.
func (k *keys) appendTo(args []any) []any {
	args = append(args, len(k.ends))
	text, begin := string(k.text), 0
	for _, end := range k.ends {
		args = append(args, text[begin:end])
		begin = end
	}
	return args
}

// appendName appends the first part of the keys of a charge's counter.
func appendName(name []byte, base string, c ratelimit.Charge) []byte {
	name = append(append(append(name, base...), c.Limit.Name...), ':')
	if c.Key == "" {
		return name
	}
	return append(append(name, driver.EncodeKey(c.Key)...), ':')
}

// decideArgs returns a command: head, and the keys and arguments of decide.lua for several calls.
func decideArgs(head []any, calls []*call, now int64) []any {
	charges := 0
	for _, c := range calls {
		charges += len(c.charges)
	}
	var space struct { // enough for one call, in a single allocation
		rules    [4]redisRule
		counters [4]counter
		asked    [4]part
		text     [256]byte
		ends     [12]int
	}
	b := bundle{now: now, calls: calls, rules: space.rules[:0]}
	b.counters, b.asked = slices.Grow(space.counters[:0], charges), slices.Grow(space.asked[:0], charges)
	b.keys = keys{slices.Grow(space.text[:0], 64*charges), slices.Grow(space.ends[:0], 3*charges)}
	if len(calls) > 1 { // one call never uses a counter twice
		b.known = make(map[counterName]int, 2*len(calls))
	}
	for _, c := range calls {
		for _, charge := range c.charges {
			rule := b.rule(charge.Limit)
			b.asked = append(b.asked, part{rule, b.counter(c.base, charge, rule)})
		}
	}
	args := append(make([]any, 0, len(head)+2+len(b.keys.ends)), head...)
	return append(b.keys.appendTo(args), b.pack())
}

// bundle gathers calls.
type bundle struct {
	now      int64
	calls    []*call
	keys     keys
	rules    []redisRule
	counters []counter
	asked    []part // the charges of all calls
	known    map[counterName]int
}

type redisRule struct {
	limit  ratelimit.Limit
	window int64 // m0
	keys   int64 // number of keys of each counter
}

// counter is a counter's rule, and the index of its first key among all keys, starting at 1 as in Lua.
type counter struct{ rule, key int }

// part is the rule and the counter of a charge.
type part struct{ rule, counter int }

type counterName struct {
	rule int
	key  string
}

func (b *bundle) rule(limit ratelimit.Limit) int {
	for i := range b.rules {
		if b.rules[i].limit == limit {
			return i
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
	return len(b.rules) - 1
}

func (b *bundle) counter(base string, c ratelimit.Charge, rule int) int {
	name := counterName{b.first(rule), c.Key}
	if at, ok := b.known[name]; ok {
		return at
	}
	at := len(b.counters)
	if b.known != nil {
		b.known[name] = at
	}
	b.counters = append(b.counters, counter{rule, len(b.keys.ends) + 1})
	r := b.rules[rule]
	b.keys.add(base, c, r.window, r.keys)
	return at
}

// first returns the first of the rules that share the counters of a rule, like plans that differ only in Max.
func (b *bundle) first(rule int) int {
	l := b.rules[rule].limit
	for i := range b.rules[:rule] {
		o := b.rules[i].limit
		if o.Name == l.Name && o.Window == l.Window && (o.Algorithm == ratelimit.TokenBucket) == (l.Algorithm == ratelimit.TokenBucket) {
			return i
		}
	}
	return rule
}

// The index of the rules in decide.lua, and the number of integers for each rule and each counter.
const rulesAt, ruleSize, counterSize = 3, 6, 5

// pack returns the msgpack array that decide.lua reads.
func (b *bundle) pack() []byte {
	countersAt := rulesAt + ruleSize*len(b.rules)
	questionsAt := countersAt + counterSize*len(b.counters)
	n := questionsAt - 1 + 3*len(b.calls) + 3*len(b.asked)
	out := make([]byte, 0, 5+3*n)
	out = binary.BigEndian.AppendUint32(append(out, 0xdd), uint32(n))
	out = appendInts(out, int64(countersAt), int64(questionsAt))
	for i := range b.rules {
		r := &b.rules[i]
		l := &r.limit
		out = appendInts(out, kind(*l), l.Window.Milliseconds(), l.Max, capacity(*l), r.window, max(0, r.keys-2))
	}
	for _, c := range b.counters {
		out = appendInts(out, int64(rulesAt+ruleSize*c.rule), int64(c.key), 0, 0, 0)
	}
	asked := b.asked
	for _, c := range b.calls {
		take := int64(0)
		if c.take {
			take = 1
		}
		out = appendInts(out, take, c.within, int64(len(c.charges)))
		for i := range c.charges {
			charge, at := &c.charges[i], asked[i]
			// A cost beyond the limit is always denied, so it is replaced by one that is exact.
			cost := min(charge.Cost, max(charge.Limit.Max, charge.Limit.Burst)+1)
			out = appendInts(out, int64(rulesAt+ruleSize*at.rule), int64(countersAt+counterSize*at.counter), cost)
		}
		asked = asked[len(c.charges):]
	}
	return out
}

func appendInts(out []byte, values ...int64) []byte {
	for _, v := range values {
		switch {
		case 0 <= v && v < 1<<7:
			out = append(out, byte(v))
		case 0 <= v && v < 1<<16:
			out = binary.BigEndian.AppendUint16(append(out, 0xcd), uint16(v))
		default:
			out = binary.BigEndian.AppendUint64(append(out, 0xd3), uint64(v))
		}
	}
	return out
}

// refundArgs returns a command: head, and the keys and arguments of refund.lua and reset.lua.
func refundArgs(head []any, c *call, now int64) []any {
	var k keys
	for _, charge := range c.charges {
		k.add(c.base, charge, window(charge.Limit, now), 3)
	}
	args := k.appendTo(append(make([]any, 0, len(head)+1+9*len(c.charges)), head...))
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

// capacity returns the number of units that a limit holds.
func capacity(l ratelimit.Limit) int64 {
	if l.Algorithm == ratelimit.TokenBucket {
		return l.Burst
	}
	return l.Max
}

// kind returns the number of an algorithm in the scripts.
func kind(l ratelimit.Limit) int64 {
	switch l.Algorithm {
	case ratelimit.TokenBucket:
		return 2
	case ratelimit.FixedWindow:
		return 1
	}
	return 0
}

// maxTries limits how often a script is sent. A second time is needed if the server does not have it, and another
// time if the server is in another window than expected. The first answer contains the time, so a second miss needs a
// clock that jumps.
const maxTries = 4

var errDrift = errors.New("the server's clock jumped")

// call is one call to Redis, for which a caller waits.
type call struct {
	script  *script
	many    bool   // one run of this script serves many calls
	base    string // the first part of the keys
	charges []ratelimit.Charge
	take    bool
	within  int64 // in milliseconds

	now   int64   // by the server's clock
	reply []int64 // the script's reply for this call
	err   error
}

// eval is one run of a script, for one call or many.
type eval struct {
	script *script
	calls  []*call
	inFull bool // send the source: the server does not have the script
	cmd    *redis.IntSliceCmd

	// The clock offset of the first try. Nodes of a cluster have different clocks, and another call may have used
	// another node in the meantime.
	drifted bool
	offset  int64
}

// evalsFor bundles the calls that one run can serve. All keys are in one slot.
func evalsFor(batch []*call) (evals []*eval) {
	for _, c := range batch {
		e := matching(evals, c)
		if e == nil {
			e = &eval{script: c.script}
			evals = append(evals, e)
		}
		e.calls = append(e.calls, c)
	}
	return evals
}

func matching(evals []*eval, c *call) *eval {
	if c.many {
		for _, e := range evals {
			if e.script == c.script {
				return e
			}
		}
	}
	return nil
}

// once is a command that the client must not repeat after a broken connection, because it may have taken effect.
type once struct{ *redis.IntSliceCmd }

// NoRetry implements redis.Cmder.
func (once) NoRetry() bool { return true }

// sender runs scripts.
type sender struct {
	client  redis.UniversalClient
	drifted func(ctx context.Context) // called if the server was in another window
	offset  atomic.Int64              // the server's clock minus the local clock, in milliseconds
}

// send stores the results in the calls.
func (s *sender) send(ctx context.Context, batch []*call) {
	evals := evalsFor(batch)
	for range maxTries {
		s.pipe(ctx, evals)
		var again []*eval
		for _, e := range evals {
			if s.again(ctx, e) {
				again = append(again, e)
			}
		}
		if evals = again; len(evals) == 0 {
			return
		}
	}
}

func (s *sender) pipe(ctx context.Context, evals []*eval) {
	now, offset := time.Now().UnixMilli(), s.offset.Load()
	for _, e := range evals {
		if !e.drifted {
			e.offset = offset
		}
		e.cmd = redis.NewIntSliceCmd(ctx, e.args(now+e.offset)...)
	}
	if len(evals) == 1 {
		_ = s.client.Process(ctx, once{evals[0].cmd}) // the command holds the error
		return
	}
	pipe := s.client.Pipeline()
	for _, e := range evals {
		_ = pipe.Process(ctx, once{e.cmd}) // queues it
	}
	_, _ = pipe.Exec(ctx) // the commands hold the errors
}

func (e *eval) args(now int64) []any {
	head := []any{"evalsha", e.script.sha}
	if e.inFull {
		head = []any{"eval", e.script.source}
	}
	if e.calls[0].many {
		return decideArgs(head, e.calls, now)
	}
	return refundArgs(head, e.calls[0], now)
}

// again reports whether to send the run again. If not, its calls have their results.
func (s *sender) again(ctx context.Context, e *eval) bool {
	reply, err := e.cmd.Result()
	switch {
	case err != nil && !e.inFull && strings.HasPrefix(err.Error(), "NOSCRIPT"):
		e.inFull = true
		return true
	case err == nil && len(reply) < 2:
		err = fmt.Errorf("script returned %d numbers", len(reply))
	case err == nil:
		offset := reply[0] - time.Now().UnixMilli()
		s.offset.Store(offset)
		if reply[1] < 0 {
			e.drifted, e.offset = true, offset
			s.drifted(ctx)
			e.settle(nil, 0, errDrift)
			return true
		}
		e.settle(reply[2:], reply[0], nil)
		return false
	}
	e.settle(nil, 0, err)
	return false
}

// settle gives each call its part of the reply.
func (e *eval) settle(reply []int64, now int64, err error) {
	for _, c := range e.calls {
		c.now, c.err = now, err
		if err != nil || !c.many {
			continue
		}
		n := 1 + 2*len(c.charges)
		if len(reply) < n {
			c.err = fmt.Errorf("script returned %d numbers too few", n-len(reply))
			continue
		}
		c.reply, reply = reply[:n], reply[n:]
	}
}
