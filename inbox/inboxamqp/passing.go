package inboxamqp

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/internal/runloop"
	"github.com/holdfast-go/holdfast/internal/telemetry"
	"github.com/holdfast-go/holdfast/internal/wire"
)

const (
	// passPause is how often messages are tried again that cannot be published for now.
	passPause = 250 * time.Millisecond
	// refusedPause is between two messages whose delay queue takes none: it is missing, or closed
	// to this user. Each goes behind the others of the consumer's own queue, and comes again.
	refusedPause = 50 * time.Millisecond
	// refusedAge is how long Ready remembers such a queue.
	refusedAge = 15 * time.Second
	// maxRenewals bounds how often a session consumes anew because of messages that wait to pass.
	maxRenewals = 4
)

// passing are the messages of all sessions that wait longer than any delay queue does. They go from
// one to the next, and only the transport sees them.
type passing struct {
	copies  *copier
	wake    chan struct{}
	seldom  telemetry.Seldom
	mu      sync.Mutex
	waiting []*delivery
	last    error // why a delay queue took none,
	when    time.Time
}

func newPassing(copies *copier) *passing {
	return &passing{copies: copies, wake: make(chan struct{}, 1)}
}

// add takes a message over.
func (p *passing) add(ds ...*delivery) {
	p.mu.Lock()
	p.waiting = append(p.waiting, ds...)
	p.mu.Unlock()
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// take returns some of the messages. Those of sessions that have ended are dropped: the broker
// delivers them again.
func (p *passing) take() (ds []*delivery) {
	p.mu.Lock()
	defer p.mu.Unlock()
	rest := p.waiting[:0]
	for _, d := range p.waiting {
		switch {
		case d.session.gone():
		case len(ds) < maxMoves:
			ds = append(ds, d)
		default:
			rest = append(rest, d)
		}
	}
	clear(p.waiting[len(rest):])
	p.waiting = rest
	return ds
}

// refuse remembers that a delay queue took none.
func (p *passing) refuse(err error, now time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.last, p.when = err, now
}

// refused returns why a delay queue took none lately.
func (p *passing) refused(now time.Time) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.last == nil || now.Sub(p.when) > refusedAge {
		return nil
	}
	return fmt.Errorf("a delay queue takes no messages: %w", p.last)
}

// run has the messages wait on until ctx ends. What is left then is unsettled.
func (p *passing) run(ctx context.Context) {
	for ctx.Err() == nil {
		ds := p.take()
		if len(ds) == 0 {
			select {
			case <-p.wake:
			case <-ctx.Done():
			}
			continue
		}
		if p.forward(ctx, ds) {
			_ = runloop.Sleep(ctx, passPause) // the loop sees the end of ctx
		}
	}
}

// forward publishes copies of messages for the rest of their delays, and reports whether none can be
// published for now.
func (p *passing) forward(ctx context.Context, ds []*delivery) (later bool) {
	outs := make([]*outgoing, len(ds))
	for i, d := range ds {
		copied := duplicate(d.raw)
		outs[i] = p.copies.toWait(d.session.src.queue, copied, d.wait, copied.Headers[wire.HeaderPutOff] != nil)
	}
	p.copies.publish(ctx, outs)
	for i, out := range outs {
		switch {
		case out.err == nil:
			p.passed(ctx, ds[i])
		case unavailable(out.err):
			later = true
			p.keep(ds[i])
		default:
			p.detour(ctx, ds[i], out.result())
		}
	}
	return later
}

// passed ends the original of a message that is stored elsewhere.
func (p *passing) passed(ctx context.Context, d *delivery) {
	d.session.passing.Add(-1)
	_ = d.session.Ack(ctx, []driver.Delivery{d}, false) // if it comes again it takes the same way
}

// keep has a message wait here. The receiver is told when such messages hold half of its window.
func (p *passing) keep(d *delivery) {
	p.add(d)
	if d.session.passing.Load() >= d.session.most.Load() {
		select {
		case d.session.crowded <- struct{}{}:
		default:
		}
	}
}

// detour puts a message behind the others of its own queue, since no delay queue takes it.
func (p *passing) detour(ctx context.Context, d *delivery, why error) {
	p.refuse(why, time.Now())
	if repeats, due := p.seldom.Due(); due {
		p.copies.cfg.Logger.ErrorContext(ctx, "a delay queue takes no messages: they go behind the others", slog.Any("error", why), slog.Int("repeats", repeats))
	}
	_ = runloop.Sleep(ctx, refusedPause) // the end of ctx shows in what follows
	out := &outgoing{key: d.session.src.queue, copied: duplicate(d.raw)}
	p.copies.publish(ctx, []*outgoing{out})
	if out.err == nil {
		p.passed(ctx, d)
		return
	}
	p.keep(d)
}
