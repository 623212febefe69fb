package outbox

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"go.opentelemetry.io/otel/trace"

	"github.com/holdfast-go/holdfast/internal/backoff"
	"github.com/holdfast-go/holdfast/internal/runloop"
	"github.com/holdfast-go/holdfast/outbox/driver"
)

const (
	// settleTimeout is for how long a batch is tried to be settled. That is also for how long a store may
	// be away without anything being published twice, unless another relay takes the lanes when it returns.
	settleTimeout = 30 * time.Second
	// wholeSettles is how often that is tried before the failures are left out.
	wholeSettles = 3
)

// round is what one batch came to. The error means that it could not be settled, or not whole.
type round struct {
	claimed, published, failed, dead int
	more                             bool // another claim may find something because of this one
	err                              error
}

// rounds claim, publish and settle the batches of one store. Any number of goroutines may.
type rounds struct {
	source     driver.Source
	transports transports
	cfg        RelayConfig
	telemetry  instruments
	log        journal
	health     *health

	reports sync.Mutex // one batch is reported at a time
}

func (rs *rounds) claim(ctx context.Context, limit int, alone bool, begin time.Time) (driver.Batch, error) {
	ctx, cancel := context.WithTimeout(ctx, rs.cfg.storeTimeout())
	defer cancel()
	skip := rs.transports.leftAlone()
	batch, err := rs.source.Claim(ctx, driver.Claim{Limit: limit, Lease: rs.cfg.LeaseTTL, Skip: skip, Alone: alone})
	rs.health.saw(cmp.Or(err, batch.Refused))
	if err == nil && len(batch.Messages) == 0 {
		for name, t := range rs.transports {
			if !slices.Contains(skip, name) {
				t.breaker.forget()
			}
		}
	}
	rs.transports.begin(batch.Messages, begin)
	return batch, err
}

// run publishes and settles a batch that was claimed at begin. When send ends it sends nothing
// more; the longer of the spans are for the rest.
func (rs *rounds) run(send context.Context, life spans, batch driver.Batch, begin time.Time) round {
	work, end := rs.telemetry.startRound(life.work, batch)
	defer end()
	held, release := rs.hold(work, batch.Leases, begin)
	var outcomes []outcome
	var down map[string]outage
	if len(batch.Messages) == 1 && batch.Unsettled >= rs.cfg.MaxCrashes {
		outcomes = quarantine(batch.Unsettled)
	} else {
		outcomes, down = rs.publish(send, life, held, batch)
	}
	settlements, failures := rs.judge(batch.Messages, outcomes)
	settled, err := rs.settle(work, batch, settlements)
	release()
	rs.health.saw(cmp.Or(err, settled.unrecorded, settled.Refused))

	rs.reports.Lock()
	defer rs.reports.Unlock()
	paused := rs.transports.paused() != nil
	rs.transports.end(work, begin, batch, outcomes, down)
	paused = paused || rs.transports.paused() != nil
	if err != nil {
		return round{claimed: len(batch.Messages), more: true, err: err}
	}
	if n := len(settled.Stale); n > 0 {
		rs.telemetry.stale.Add(work, int64(n))
		rs.log(work, slog.LevelWarn, "outbox: leases ran out before they were settled; their messages are published again", "", slog.Int("lanes", n))
	}
	if settled.unrecorded != nil {
		for i := range failures {
			outcomes[i] = outcome{}
		}
	}
	res := rs.report(work, batch.Messages, outcomes, failures)
	// What waits now, was given back, or was left to a transport that is back, the store's answer does not tell of.
	res.more = settled.More || paused || len(settled.Stale) > 0 || res.published < res.claimed
	res.err = settled.unrecorded
	return res
}

// publish has until PublishTimeout, and sends in the first half of it: what is unconfirmed at the
// end has then waited for that long, so that a long or slow batch is not taken for an outage. After
// the end of ctx, or of the leases, it sends nothing more; it waits for the confirms as long as there
// is time left to settle.
func (rs *rounds) publish(ctx context.Context, life spans, held context.Context, batch driver.Batch) ([]outcome, map[string]outage) {
	wait, cancelWait := context.WithTimeout(life.confirm, rs.cfg.PublishTimeout)
	defer cancelWait()
	wait = trace.ContextWithSpan(wait, trace.SpanFromContext(held))
	send, cancelSend := context.WithTimeout(ctx, rs.cfg.PublishTimeout/2)
	defer cancelSend()
	defer context.AfterFunc(held, cancelSend)()
	p := pipeline{
		transports: rs.transports, messages: batch.Messages, unread: batch.Unreadable,
		life: life.life, send: send, wait: wait,
		startSend: func(m driver.Message) trace.Span { return rs.telemetry.startSend(wait, m) },
		confirmed: func(m driver.Message, begin time.Time) { rs.telemetry.confirmed(wait, m, begin) },
	}
	return p.run()
}

// judge turns the outcomes into settlements for the store. Messages given back have neither a
// settlement nor a failure.
func (rs *rounds) judge(messages []driver.Message, outcomes []outcome) ([]driver.Settlement, map[int]failure) {
	settlements := make([]driver.Settlement, 0, len(messages))
	failures := map[int]failure{}
	for i, o := range outcomes {
		m := messages[i]
		switch {
		case !o.done:
		case o.err == nil:
			settlements = append(settlements, driver.Settlement{ID: m.ID, Verdict: driver.Published})
		default:
			f := rs.failure(m, o.err)
			failures[i] = f
			s := driver.Settlement{ID: m.ID, Verdict: driver.Failed, Delay: f.delay, Class: f.class, Err: errorText(o.err)}
			if f.dead {
				s.Verdict = driver.Dead
			}
			settlements = append(settlements, s)
		}
	}
	return settlements, failures
}

// settlement is what the store took of a batch.
type settlement struct {
	driver.Settled
	unrecorded error // why the failures were left out: their messages were given back
}

// settle tries until it worked: what is not settled is published again. A store that refuses to record
// failures, since its disk is full or one of them is too much for it, may still take what was published,
// and that must not be published again for the sake of the others.
func (rs *rounds) settle(ctx context.Context, b driver.Batch, verdicts []driver.Settlement) (settlement, error) {
	between := backoff.Policy{Base: 50 * time.Millisecond, Max: time.Second, Jitter: 0.5}
	end := time.Now().Add(settleTimeout)
	sound := publishedOnly(verdicts)
	for n := 1; ; n++ {
		settled, err := rs.trySettle(ctx, b, verdicts)
		if err == nil {
			return settlement{Settled: settled}, nil
		}
		rs.health.saw(err)
		if n >= wholeSettles && len(sound) < len(verdicts) {
			if settled, refused := rs.trySettle(ctx, b, sound); refused == nil {
				return settlement{settled, fmt.Errorf("record %d failures: %w", len(verdicts)-len(sound), err)}, nil
			}
		}
		delay := between.Delay(n-1, rs.cfg.Rand())
		if time.Now().Add(delay).After(end) || runloop.Sleep(ctx, delay) != nil {
			_, _ = rs.trySettle(ctx, b, nil) // given back, no message is suspected of having ended a relay
			return settlement{}, fmt.Errorf("settle %d messages: %w", len(verdicts), err)
		}
	}
}

func (rs *rounds) trySettle(ctx context.Context, b driver.Batch, verdicts []driver.Settlement) (driver.Settled, error) {
	ctx, cancel := context.WithTimeout(ctx, rs.cfg.storeTimeout())
	defer cancel()
	return rs.source.Settle(ctx, b, verdicts)
}

func publishedOnly(verdicts []driver.Settlement) []driver.Settlement {
	sound := make([]driver.Settlement, 0, len(verdicts))
	for _, v := range verdicts {
		if v.Verdict == driver.Published {
			sound = append(sound, v)
		}
	}
	return sound
}
