package outbox

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"strings"
	"time"

	"go.opentelemetry.io/otel/trace"

	"github.com/holdfast-go/holdfast/internal/runloop"
	"github.com/holdfast-go/holdfast/outbox/driver"
)

// round is what one batch came to. The error means that it could not be settled, or not whole.
type round struct {
	claimed, published, failed, dead int
	err                              error
}

func (r *Relay) claim(ctx context.Context, limit int, alone bool, begin time.Time) (driver.Batch, error) {
	ctx, cancel := context.WithTimeout(ctx, r.cfg.StoreTimeout)
	defer cancel()
	skip := r.paused()
	batch, err := r.source.Claim(ctx, driver.Claim{Limit: limit, Lease: r.cfg.LeaseTTL, Skip: skip, Alone: alone})
	r.setLastLook(err)
	if err == nil && len(batch.Messages) == 0 {
		r.forgetPauses(skip)
	}
	r.tryPaused(batch.Messages, begin)
	return batch, err
}

// round publishes and settles a batch that was claimed at begin. When ctx ends it sends nothing more;
// work lives on for the rest.
func (r *Relay) round(ctx, work context.Context, batch driver.Batch, begin time.Time) round {
	work, end := r.telemetry.startRound(work, batch)
	defer end()
	held, release := r.hold(work, batch.Leases, begin)
	var outcomes []outcome
	var down map[string]outage
	if len(batch.Messages) == 1 && batch.Unsettled >= r.cfg.MaxCrashes {
		outcomes = quarantine(batch.Unsettled)
	} else {
		outcomes, down = r.publish(ctx, held, batch)
	}
	verdicts, failures := r.judge(batch.Messages, outcomes)
	settled, err := r.settle(work, batch, verdicts)
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
func (r *Relay) publish(ctx, held context.Context, batch driver.Batch) ([]outcome, map[string]outage) {
	wait, cancel := runloop.Detach(ctx, r.cfg.ShutdownTimeout-r.cfg.StoreTimeout)
	defer cancel()
	wait, cancelWait := context.WithTimeout(wait, r.cfg.PublishTimeout)
	defer cancelWait()
	wait = trace.ContextWithSpan(wait, trace.SpanFromContext(held))
	send, cancelSend := context.WithTimeout(ctx, r.cfg.PublishTimeout/2)
	defer cancelSend()
	defer context.AfterFunc(held, cancelSend)()
	p := pipeline{relay: r, messages: batch.Messages, unread: batch.Unreadable, life: ctx, send: send, wait: wait}
	return p.run()
}

// quarantine is the outcome of a message that is not published any more, since relays were lost that
// had nothing else in hand.
func quarantine(losses int) []outcome {
	err := fmt.Errorf("%d relays in a row were lost with this message", losses)
	return []outcome{{done: true, err: &driver.PublishError{Class: driver.Quarantined, Err: err}}}
}

// judge turns the outcomes into verdicts for the store. Messages given back have neither a
// verdict nor a failure.
func (r *Relay) judge(messages []driver.Message, outcomes []outcome) ([]driver.Settlement, map[int]Failure) {
	verdicts := make([]driver.Settlement, 0, len(messages))
	failures := map[int]Failure{}
	for i, o := range outcomes {
		m := messages[i]
		switch {
		case !o.done:
		case o.err == nil:
			verdicts = append(verdicts, driver.Settlement{ID: m.ID, Verdict: driver.Published})
		default:
			f := r.failure(m, o.err)
			failures[i] = f
			v := driver.Settlement{ID: m.ID, Verdict: driver.Failed, Delay: f.Delay, Class: f.Class, Err: errorText(o.err)}
			if f.Dead {
				v.Verdict = driver.Dead
			}
			verdicts = append(verdicts, v)
		}
	}
	return verdicts, failures
}

func (r *Relay) failure(m driver.Message, err error) Failure {
	f := Failure{Class: driver.ClassOf(err), Err: err, Attempt: m.Attempts + 1}
	policy := r.cfg.policy(m.Name)
	f.Dead = f.Class == driver.Quarantined || f.Attempt >= policy.attempts(f.Class)
	if !f.Dead {
		f.Delay = policy.retryDelay(f.Attempt, r.cfg.Rand())
	}
	return f
}

func (r *Relay) notePauses(ctx context.Context, begin time.Time, batch driver.Batch, outcomes []outcome, down map[string]outage) {
	answered := map[string]bool{}
	for i, o := range outcomes {
		name := batch.Messages[i].Transport
		answered[name] = answered[name] || o.done && batch.Unreadable[i] == nil
	}
	for name, ok := range answered {
		if outage, isDown := down[name]; isDown {
			r.setPause(ctx, name, outage, begin)
		} else {
			r.endPause(ctx, name, begin, ok)
		}
	}
}

func (r *Relay) report(ctx context.Context, messages []driver.Message, outcomes []outcome, failures map[int]Failure) round {
	res := round{claimed: len(messages)}
	for i, o := range outcomes {
		m := messages[i]
		f, failed := failures[i]
		switch {
		case !o.done:
		case !failed:
			res.published++
			if r.cfg.Hooks.OnPublished != nil {
				r.cfg.Hooks.OnPublished(ctx, m)
			}
		default:
			res.failed++
			if f.Dead {
				res.dead++
			}
			r.reportFailure(ctx, m, f)
		}
	}
	r.telemetry.published.Add(ctx, int64(res.published))
	r.telemetry.givenBack.Add(ctx, int64(res.claimed-res.published-res.failed))
	return res
}

func (r *Relay) reportFailure(ctx context.Context, m driver.Message, f Failure) {
	r.telemetry.countFailure(ctx, f)
	text := "outbox: publishing failed, will be tried again"
	if f.Dead {
		text = "outbox: publishing failed for good, the message is a dead letter"
	}
	r.log(ctx, slog.LevelWarn, text, string(f.Class)+" "+m.Name, slog.Any("id", m.ID), slog.String("name", m.Name),
		slog.Any("class", f.Class), slog.Int("attempt", f.Attempt), slog.Any("error", f.Err))
	if r.cfg.Hooks.OnFailed != nil {
		r.cfg.Hooks.OnFailed(ctx, m, f)
	}
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
