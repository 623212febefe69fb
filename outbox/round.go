package outbox

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"go.opentelemetry.io/otel/trace"

	"github.com/holdfast-go/holdfast/outbox/driver"
)

// round is what one batch came to. The error means that it could not be settled, or not whole.
type round struct {
	claimed, published, failed, dead int
	err                              error
}

func (r *Relay) claim(ctx context.Context, limit int, alone bool, begin time.Time) (driver.Batch, error) {
	ctx, cancel := context.WithTimeout(ctx, r.cfg.storeTimeout())
	defer cancel()
	skip := r.transports.leftAlone()
	batch, err := r.source.Claim(ctx, driver.Claim{Limit: limit, Lease: r.cfg.LeaseTTL, Skip: skip, Alone: alone})
	r.setLastLook(err)
	if err == nil && len(batch.Messages) == 0 {
		for name, t := range r.transports {
			if !slices.Contains(skip, name) {
				t.forget()
			}
		}
	}
	r.transports.try(batch.Messages, begin)
	return batch, err
}

// round publishes and settles a batch that was claimed at begin. When send ends it sends nothing
// more; the longer of the spans are for the rest.
func (r *Relay) round(send context.Context, life spans, batch driver.Batch, begin time.Time) round {
	work, end := r.telemetry.startRound(life.work, batch)
	defer end()
	held, release := r.hold(work, batch.Leases, begin)
	var outcomes []outcome
	var down map[string]outage
	if len(batch.Messages) == 1 && batch.Unsettled >= r.cfg.MaxCrashes {
		outcomes = quarantine(batch.Unsettled)
	} else {
		outcomes, down = r.publish(send, life, held, batch)
	}
	settlements, failures := r.judge(batch.Messages, outcomes)
	settled, err := r.settle(work, batch, settlements)
	release()
	r.setLastLook(cmp.Or(err, settled.unrecorded))

	r.reports.Lock()
	defer r.reports.Unlock()
	r.notePauses(work, begin, batch, outcomes, down)
	if err != nil {
		return round{claimed: len(batch.Messages), err: err}
	}
	if n := len(settled.stale); n > 0 {
		r.telemetry.stale.Add(work, int64(n))
		r.log(work, slog.LevelWarn, "outbox: leases ran out before they were settled; their messages are published again", "", slog.Int("lanes", n))
	}
	if settled.unrecorded != nil {
		for i := range failures {
			outcomes[i] = outcome{}
		}
	}
	res := r.report(work, batch.Messages, outcomes, failures)
	res.err = settled.unrecorded
	return res
}

// publish has until PublishTimeout, and sends in the first half of it: what is unconfirmed at the
// end has then waited for that long, so that a long or slow batch is not taken for an outage. After
// the end of ctx, or of the leases, it sends nothing more; it waits for the confirms as long as there
// is time left to settle.
func (r *Relay) publish(ctx context.Context, life spans, held context.Context, batch driver.Batch) ([]outcome, map[string]outage) {
	wait, cancelWait := context.WithTimeout(life.confirm, r.cfg.PublishTimeout)
	defer cancelWait()
	wait = trace.ContextWithSpan(wait, trace.SpanFromContext(held))
	send, cancelSend := context.WithTimeout(ctx, r.cfg.PublishTimeout/2)
	defer cancelSend()
	defer context.AfterFunc(held, cancelSend)()
	p := pipeline{
		transports: r.transports, messages: batch.Messages, unread: batch.Unreadable,
		life: life.life, send: send, wait: wait,
		confirmed: func(m driver.Message, begin time.Time) { r.telemetry.confirmed(wait, m, begin) },
		panicked: func(m driver.Message, value any, stack []byte) {
			r.log(wait, slog.LevelError, "outbox: publisher panicked", m.Transport,
				slog.Any("id", m.ID), slog.Any("panic", value), slog.String("stack", string(stack)))
		},
	}
	return p.run()
}

// quarantine is the outcome of a message that is not published any more, since relays were lost that
// had nothing else in hand.
func quarantine(losses int) []outcome {
	err := fmt.Errorf("%d relays in a row were lost with this message", losses)
	return []outcome{{done: true, err: &driver.PublishError{Class: driver.Quarantined, Err: err}}}
}

// failure is a failed attempt to publish.
type failure struct {
	class   driver.Class
	err     error
	attempt int           // its number, from 1
	dead    bool          // it was the last one: the message becomes a dead letter
	delay   time.Duration // until the next one, if not dead
}

// judge turns the outcomes into settlements for the store. Messages given back have neither a
// settlement nor a failure.
func (r *Relay) judge(messages []driver.Message, outcomes []outcome) ([]driver.Settlement, map[int]failure) {
	settlements := make([]driver.Settlement, 0, len(messages))
	failures := map[int]failure{}
	for i, o := range outcomes {
		m := messages[i]
		switch {
		case !o.done:
		case o.err == nil:
			settlements = append(settlements, driver.Settlement{ID: m.ID, Verdict: driver.Published})
		default:
			f := r.failure(m, o.err)
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

func (r *Relay) failure(m driver.Message, err error) failure {
	f := failure{class: driver.ClassOf(err), err: err, attempt: m.Attempts + 1}
	policy := r.cfg.retry(m.Name)
	f.dead = policy.last(f.attempt, f.class)
	if !f.dead {
		f.delay = policy.delay(f.attempt, r.cfg.Rand())
	}
	return f
}

// notePauses tells each transport of the batch how it has done.
func (r *Relay) notePauses(ctx context.Context, begin time.Time, batch driver.Batch, outcomes []outcome, down map[string]outage) {
	answered := map[string]bool{}
	for i, o := range outcomes {
		name := batch.Messages[i].Transport
		answered[name] = answered[name] || o.done && batch.Unreadable[i] == nil
	}
	for name, ok := range answered {
		t, known := r.transports[name]
		if !known {
			continue
		}
		outage, isDown := down[name]
		if !isDown {
			if failures, resumed := t.end(begin, ok); resumed {
				r.log(ctx, slog.LevelInfo, "outbox: transport resumed", name, slog.String("transport", name), slog.Int("failures", failures))
			}
			continue
		}
		if failures, length, paused := t.fail(outage, begin); paused {
			r.log(ctx, slog.LevelWarn, "outbox: transport paused", name, slog.String("transport", name),
				slog.Int("failures", failures), slog.Duration("pause", length), slog.Any("error", outage.err))
		}
	}
}

func (r *Relay) report(ctx context.Context, messages []driver.Message, outcomes []outcome, failures map[int]failure) round {
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
			r.reportFailure(ctx, messages[i], f)
		}
	}
	r.telemetry.published.Add(ctx, int64(res.published))
	r.telemetry.givenBack.Add(ctx, int64(res.claimed-res.published-res.failed))
	return res
}

func (r *Relay) reportFailure(ctx context.Context, m driver.Message, f failure) {
	r.telemetry.countFailure(ctx, f)
	text := "outbox: publishing failed, will be tried again"
	if f.dead {
		text = "outbox: publishing failed for good, the message is a dead letter"
	}
	r.log(ctx, slog.LevelWarn, text, string(f.class)+" "+m.Name, slog.Any("id", m.ID), slog.String("name", m.Name),
		slog.Any("class", f.class), slog.Int("attempt", f.attempt), slog.Any("error", f.err))
}

// maxError bounds the stored text of an error, in bytes.
const maxError = 1000

// errorText is what is stored of an error: bounded, and without what a database refuses.
func errorText(err error) string {
	text := err.Error()
	if len(text) > maxError {
		text = text[:maxError]
	}
	return strings.ReplaceAll(strings.ToValidUTF8(text, ""), "\x00", "")
}
