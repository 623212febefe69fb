package linear_test

import (
	"context"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"

	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/redistest"
	"github.com/holdfast-go/holdfast/ratelimit"
	"github.com/holdfast-go/holdfast/ratelimit/ratelimitredis"
)

// The calls of a limiter, and the outcomes of its answers besides done and unknown.
const (
	allow  = "allow"
	refund = "refund"

	allowed = "allowed"
	denied  = "denied"
)

type limitCall struct {
	op   string
	cost int64
}

// limitAnswer has the units that remain; -1 if the answer does not show them.
type limitAnswer struct {
	outcome string
	remain  int64
}

// counterModel describes a limit whose window lasts longer than the test: a counter with a maximum. Up to ahead units
// may be held by processes that have not spent them, so that others are denied although units are left.
func counterModel(most, ahead int64) porcupine.NondeterministicModel {
	return porcupine.NondeterministicModel{
		Init: func() []any { return []any{int64(0)} },
		Step: func(state, input, output any) []any {
			used, call, got := state.(int64), input.(limitCall), output.(limitAnswer)
			after := used + call.cost
			if call.op == refund {
				after = max(0, used-call.cost)
			}
			fits := after <= most
			if got.outcome == allowed || got.outcome == done {
				used = after
			}
			switch {
			case got.outcome == unknown && fits:
				return []any{used, after}
			case got.remain >= 0 && got.remain != most-used:
				return nil
			case got.outcome == unknown,
				got.outcome == done && call.op == refund,
				got.outcome == allowed && fits,
				got.outcome == denied && after+ahead > most:
				return []any{used}
			}
			return nil
		},
	}
}

// longLimit is a limit whose window ends during a test only at midnight UTC.
var longLimit = ratelimit.Limit{Name: "linear", Max: 60, Window: 24 * time.Hour, Algorithm: ratelimit.FixedWindow}

// spend lets each client charge its limiter at random, and refund some charges. Some calls are cut.
func spend(ctx context.Context, limiters []ratelimit.Limiter, seed uint64, w workload, h *history) {
	clients(6, seed, func(id int, rng *rand.Rand) {
		limiter := limiters[id%len(limiters)]
		for range w.calls {
			cost := 1 + rng.Int64N(w.cost)
			call, cancel := ctx, func() {}
			if w.cuts {
				call, cancel = cutNow(ctx, rng)
			}
			from := now()
			d, err := limiter.Allow(call, ratelimit.Charge{Limit: longLimit, Cost: cost})
			to, answer := now(), outcomeOf(call, d, err, w.remain)
			cancel()
			h.add(limitCall{allow, cost}, from, answer, to, answer.outcome)
			if answer.outcome != allowed || rng.IntN(4) >= w.refunds {
				continue
			}
			from = now()
			if err := limiter.Refund(ctx, d.Charges()...); err != nil {
				answer = limitAnswer{err.Error(), -1}
			} else {
				answer = limitAnswer{done, -1}
			}
			h.add(limitCall{refund, cost}, from, answer, now(), answer.outcome)
		}
	})
}

func outcomeOf(ctx context.Context, d ratelimit.Decision, err error, remain bool) limitAnswer {
	answer := limitAnswer{denied, -1}
	switch {
	case err != nil && ctx.Err() != nil:
		return limitAnswer{unknown, -1}
	case err != nil:
		return limitAnswer{err.Error(), -1} // no answer of the model
	case d.Allowed:
		answer.outcome = allowed
	}
	if states := d.Limits(); remain && len(states) == 1 && !d.Cached {
		answer.remain = states[0].Remaining
	}
	return answer
}

// workload says how limits are charged, and what is checked.
type workload struct {
	calls   int   // of each client
	cost    int64 // at most
	refunds int   // of four charges
	cuts    bool
	remain  bool  // answers show how much is left
	ahead   int64 // see counterModel
}

// Whatever clients charge at the same time, the limiter answers as if they had done it one after another.
func TestLimits_areLinearizable(t *testing.T) {
	t.Parallel()
	inMemory := func(t *testing.T) []ratelimit.Limiter {
		limiter, err := ratelimit.NewMemory(ratelimit.MemoryConfig{})
		must(t, err)
		return []ratelimit.Limiter{limiter}
	}
	onRedis := func(cfg ratelimitredis.Config, processes int) func(t *testing.T) []ratelimit.Limiter {
		return func(t *testing.T) (all []ratelimit.Limiter) {
			client := redistest.New(t)
			for range processes {
				limiter, err := ratelimitredis.New(client, cfg)
				must(t, err)
				all = append(all, limiter)
			}
			return all
		}
	}
	leased := func(open func(t *testing.T) []ratelimit.Limiter) func(t *testing.T) []ratelimit.Limiter {
		return func(t *testing.T) (all []ratelimit.Limiter) {
			for _, store := range open(t) {
				limiter, err := ratelimit.NewLeased(store, ratelimit.LeasedConfig{Share: share})
				must(t, err)
				beside(t, limiter.Run)
				all = append(all, limiter)
			}
			return all
		}
	}
	// A process has at most two shares that it has not spent: in its lease, and on the way.
	const ahead = 2 * 2 * 60 / share
	for name, tt := range map[string]struct {
		open func(t *testing.T) []ratelimit.Limiter
		workload
	}{
		"memory": {inMemory, workload{calls: 15, cost: 3, refunds: 2, remain: true}},
		"redis":  {onRedis(ratelimitredis.Config{DenyCache: -1}, 2), workload{calls: 15, cost: 3, refunds: 2, remain: true, cuts: true}},
		// A refund of another process takes effect after a remembered denial ends.
		"redis, remembered denials": {onRedis(ratelimitredis.Config{}, 2), workload{calls: 15, cost: 3, remain: true, cuts: true}},
		"leased, redis":             {leased(onRedis(ratelimitredis.Config{DenyCache: -1}, 2)), workload{calls: 20, cost: 1, ahead: ahead}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			seen := map[string]int{}
			for seed := range uint64(testenv.Sequences(t, 5)) {
				h := &history{}
				spend(t.Context(), tt.open(t), seed, tt.workload, h)
				if err := h.check(counterModel(longLimit.Max, tt.ahead)); err != nil {
					t.Fatalf("seed %d: %v", seed, err)
				}
				for outcome, n := range h.seen {
					seen[outcome] += n
				}
			}
			t.Log(seen)
			if seen[allowed] == 0 || seen[denied] == 0 || tt.refunds > 0 == (seen[done] == 0) || tt.cuts == (seen[unknown] == 0) {
				t.Errorf("outcomes: %v", seen)
			}
		})
	}
}

// share is the Share of leased limiters: a process takes a sixth of what is left.
const share = 6

// beside runs work until the test ends, and fails the test with its error.
func beside(t *testing.T, work func(ctx context.Context) error) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	var running sync.WaitGroup
	running.Go(func() {
		if err := work(ctx); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(func() {
		cancel()
		running.Wait()
	})
}

// unlimited shares its counter with longLimit, and admits everything.
func unlimited(cost int64) ratelimit.Charge {
	all := longLimit
	all.Max = 1 << 30
	return ratelimit.Charge{Limit: all, Cost: cost}
}

// Limiters with a fault, each of which the check must find.
type (
	// looksAhead decides in one step and charges in another one.
	looksAhead struct{ *ratelimit.Memory }
	// chargesDenied charges also the denied.
	chargesDenied struct{ *ratelimit.Memory }
	// keepsRefunds does not return anything.
	keepsRefunds struct{ *ratelimit.Memory }
	// refundsTwice returns each charge twice.
	refundsTwice struct{ *ratelimit.Memory }
)

func (l looksAhead) Allow(ctx context.Context, c ...ratelimit.Charge) (ratelimit.Decision, error) {
	if d, err := l.Peek(ctx, c...); err != nil || !d.Allowed {
		return d, err
	}
	time.Sleep(100 * time.Microsecond)
	d, err := l.Memory.Allow(ctx, unlimited(c[0].Cost))
	return d, err
}

func (l chargesDenied) Allow(ctx context.Context, c ...ratelimit.Charge) (ratelimit.Decision, error) {
	d, err := l.Memory.Allow(ctx, c...)
	if err == nil && !d.Allowed {
		_, err = l.Memory.Allow(ctx, unlimited(c[0].Cost))
	}
	return d, err
}

func (l keepsRefunds) Refund(context.Context, ...ratelimit.Charge) error { return nil }

func (l refundsTwice) Refund(ctx context.Context, c ...ratelimit.Charge) error {
	return l.Memory.Refund(ctx, append(c, c...)...)
}

func TestLimits_faultyLimitersAreNot(t *testing.T) {
	t.Parallel()
	for name, faulty := range map[string]func(*ratelimit.Memory) ratelimit.Limiter{
		"looks, then charges": func(m *ratelimit.Memory) ratelimit.Limiter { return looksAhead{m} },
		"charges the denied":  func(m *ratelimit.Memory) ratelimit.Limiter { return chargesDenied{m} },
		"keeps refunds":       func(m *ratelimit.Memory) ratelimit.Limiter { return keepsRefunds{m} },
		"refunds twice":       func(m *ratelimit.Memory) ratelimit.Limiter { return refundsTwice{m} },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for seed := range uint64(10) {
				memory, err := ratelimit.NewMemory(ratelimit.MemoryConfig{})
				must(t, err)
				h := &history{}
				spend(t.Context(), []ratelimit.Limiter{faulty(memory)}, seed, workload{calls: 15, cost: 3, refunds: 2}, h)
				if h.check(counterModel(longLimit.Max, 0)) != nil {
					return
				}
			}
			t.Error("the fault was not found")
		})
	}
}
