package outbox

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"go.opentelemetry.io/otel/trace"

	"github.com/holdfast-go/holdfast/internal/backoff"
	"github.com/holdfast-go/holdfast/internal/runloop"
	"github.com/holdfast-go/holdfast/outbox/driver"
)

const (
	// settleTimeout is the time limit for settling one batch, with retries. A store may be away that long
	// without duplicates, unless another relay takes the lanes when it returns.
	settleTimeout = 30 * time.Second
	// wholeSettles is the number of attempts with the failures, before they are left out.
	wholeSettles = 3
)

// round is the result of one batch. err means that the batch could not be settled, or only in part; refused is
// Settled.Refused.
type round struct {
	claimed, published, failed, dead int
	more                             bool // another claim may find messages because of this round
	err, refused                     error
}

// rounds claims, publishes and settles the batches of one store. It is safe for concurrent use.
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

// run publishes and settles a batch that was claimed at begin. When send ends, it sends no more messages; the
// longer contexts in life apply to the rest.
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
		rs.telemetry.stale.Add(work, int64(n), rs.telemetry.adds...)
		rs.log(work, slog.LevelWarn, "outbox: leases expired before settling", "", slog.Int("lanes", n))
	}
	if settled.unrecorded != nil {
		for i := range failures {
			outcomes[i] = outcome{}
		}
	}
	res := rs.report(work, batch.Messages, outcomes, failures)
	// The store does not report messages that wait now, were released, or belong to a transport that is back.
	res.more = settled.More || paused || len(settled.Stale) > 0 || res.published < res.claimed
	res.err, res.refused = settled.unrecorded, settled.Refused
	return res
}

// publish runs for at most PublishTimeout, and sends during the first half only. Messages unconfirmed at the end
// have then waited for at least half of it, so a long or slow batch does not look like an outage. When ctx or
// the leases end, it sends no more messages. It waits for confirms as long as time is left to settle.
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

// judge turns the outcomes into settlements for the store. Released messages have neither a settlement nor a
// failure.
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

// failure is a failed attempt to publish.
type failure struct {
	class   driver.Class
	err     error
	attempt int           // its number, from 1
	dead    bool          // it was the last one: the message becomes a dead letter
	delay   time.Duration // until the next one, if not dead
}

func (rs *rounds) failure(m driver.Message, err error) failure {
	f := failure{class: driver.ClassOf(err), err: err, attempt: m.Attempts + 1}
	policy := rs.cfg.retry(m.Name)
	f.dead = policy.last(f.attempt, f.class)
	if !f.dead {
		f.delay = policy.delay(f.attempt, rs.cfg.Rand())
	}
	return f
}

// quarantine is the outcome of a message that is no longer published, because several relays in a row were lost
// with nothing else in flight.
func quarantine(losses int) []outcome {
	err := fmt.Errorf("%d relays in a row were lost with this message", losses)
	return []outcome{{done: true, err: &driver.PublishError{Class: driver.Quarantined, Err: err}}}
}

// settlement is the part of a batch that the store recorded.
type settlement struct {
	driver.Settled
	unrecorded error // why the failures were left out; their messages were released
}

// settle retries until it succeeds or the time is over, because unsettled messages are published again. A store may
// refuse to record failures, for example because its disk is full. It may still record the published
// messages. settle then leaves out the failures, so that the published messages are not published again.
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
			_, _ = rs.trySettle(ctx, b, nil) // released messages do not become suspects
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

func (rs *rounds) report(ctx context.Context, messages []driver.Message, outcomes []outcome, failures map[int]failure) round {
	res := round{claimed: len(messages)}
	for i, o := range outcomes {
		f, failed := failures[i]
		switch {
		case !o.done:
		case !failed:
			res.published++
		default:
			res.failed++
			if f.dead {
				res.dead++
			}
			rs.reportFailure(ctx, messages[i], f)
		}
	}
	rs.telemetry.countPublished(ctx, res.published)
	rs.telemetry.givenBack.Add(ctx, int64(res.claimed-res.published-res.failed), rs.telemetry.adds...)
	return res
}

func (rs *rounds) reportFailure(ctx context.Context, m driver.Message, f failure) {
	rs.telemetry.countFailure(ctx, f)
	text := "outbox: publish failed; will retry"
	if f.dead {
		text = "outbox: publish failed; message dead-lettered"
	}
	attrs := []slog.Attr{
		slog.Any("id", m.ID), slog.String("name", m.Name),
		slog.Any("class", f.class), slog.Int("attempt", f.attempt), slog.Any("error", f.err),
	}
	if p, ok := errors.AsType[*panicError](f.err); ok {
		attrs = append(attrs, slog.String("stack", string(p.stack)))
	}
	rs.log(ctx, slog.LevelWarn, text, string(f.class)+" "+m.Name, attrs...)
}

// maxError bounds the stored text of an error, in bytes.
const maxError = 1000

// errorText returns the stored text of an error: at most maxError bytes, without bytes that a database refuses.
func errorText(err error) string {
	text := err.Error()
	if len(text) > maxError {
		text = text[:maxError]
	}
	return strings.ReplaceAll(strings.ToValidUTF8(text, ""), "\x00", "")
}

// Leases are short, so that the lanes of a killed relay are soon free. Only a batch that takes longer than a
// quarter of a lease renews its leases.
const (
	renewalsPerLease = 4
	retriesPerLease  = 16
)

// hold renews leases that started at begin, until release is called. The returned context ends when the leases
// could not be renewed in time or another relay took one of them.
func (rs *rounds) hold(ctx context.Context, leases []driver.Lease, begin time.Time) (held context.Context, release func()) {
	held, lose := context.WithCancel(ctx)
	var renewing sync.WaitGroup
	renewing.Add(1)
	first := begin.Add(rs.cfg.LeaseTTL / renewalsPerLease)
	timer := time.AfterFunc(time.Until(first), func() {
		defer renewing.Done()
		defer lose()
		rs.renew(held, leases, begin.Add(rs.cfg.LeaseTTL))
	})
	return held, func() {
		if timer.Stop() {
			renewing.Done()
		}
		lose()
		renewing.Wait()
	}
}

// renew renews the leases, which expire at end. It returns when they are lost or ctx has ended.
func (rs *rounds) renew(ctx context.Context, leases []driver.Lease, end time.Time) {
	for {
		begin := time.Now()
		// Half of the time left, so that a silent connection leaves time for another one.
		try, cancel := context.WithTimeout(ctx, max(end.Sub(begin)/2, rs.cfg.LeaseTTL/retriesPerLease))
		stale, err := rs.source.Renew(try, leases, rs.cfg.LeaseTTL)
		cancel()
		pause := rs.cfg.LeaseTTL / retriesPerLease
		if err == nil && len(stale) == 0 {
			end = begin.Add(rs.cfg.LeaseTTL)
			pause = rs.cfg.LeaseTTL / renewalsPerLease
		}
		if runloop.Sleep(ctx, min(pause, time.Until(end))) != nil {
			return
		}
		if len(stale) > 0 || !time.Now().Before(end) {
			rs.log(ctx, slog.LevelWarn, "outbox: leases expired; stopped sending the batch", "",
				slog.Int("lanes", len(leases)), slog.Any("error", err))
			return
		}
	}
}
