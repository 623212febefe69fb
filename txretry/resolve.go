package txretry

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/internal/backoff"
	"github.com/holdfast-go/holdfast/txretry/driver"
)

// Resolver finds out what became of a COMMIT whose answer did not arrive, on
// another connection, so that Do can return a definite result: committed is
// success, with the AfterCommit functions run; rolled back is retried like a
// transient failure, as long as there are attempts. [XactStatus] and [Probe]
// make one; the zero Resolver asks nobody. What remains unknown after
// Config.ResolveTimeout comes back as *[CommitUnknownError].
type Resolver struct {
	ask      func(ctx context.Context, c *call, xid string) (Outcome, error)
	wantsXID bool
	mute     bool // Probe was given no function: refused
}

func checkResolver(field string, r Resolver) error {
	if r.mute {
		return fmt.Errorf("txretry: %s: Probe has a nil function", field)
	}
	return nil
}

// XactStatus returns a Resolver that asks the server with pg_xact_status, until
// the transaction is no longer in progress. Where it is because the server waits
// for the client that has gone, its session is terminated.
//
// The transaction's id must be known before COMMIT is sent. So each begin
// message of a call that writes ends in SELECT pg_current_xact_id(): no round
// trip more, but some work for the server, a snapshot taken at once, and an id
// used up even if fn writes nothing. That is why it is not the default: every
// transaction would pay, and many have a witness of their own, such as the record
// of a request or the entry of an inbox. (The benchmark txretry, part update,
// compares.) After a failover that has lost
// transactions the id may denote another one; where that must not happen, use a
// row of the transaction itself as the witness, with [Probe].
func XactStatus() Resolver {
	return Resolver{wantsXID: true, ask: func(ctx context.Context, c *call, xid string) (Outcome, error) {
		if xid == "" {
			return Unknown, driver.ErrForgotten
		}
		fate, err := c.m.source.Fate(ctx, c.limits(), xid)
		return outcomes[fate], err
	}}
}

var outcomes = [...]Outcome{
	driver.RolledBack: RolledBack,
	driver.Committed:  Committed,
	driver.Unknown:    Unknown,
}

// Probe returns a Resolver that looks for a row which the transaction would
// have written. look runs in a READ COMMITTED transaction of its own, which is
// always rolled back. It is asked again after an error or Unknown.
//
// A SELECT that finds nothing proves nothing, for the lost transaction may be
// committing still. look should INSERT the row, which waits for the other
// transaction: a unique violation means Committed, success RolledBack. That
// holds if fn had run its own INSERT as a statement, not through [AtCommit], and
// if the row stays: a message of an outbox is a witness only where published rows
// are kept.
//
// idempotencypgx.Runner resolves its transactions in this way by itself, by
// the record of the request; it needs no Resolver.
func Probe(look func(ctx context.Context, tx pgx.Tx) (Outcome, error)) Resolver {
	return Resolver{mute: look == nil, ask: func(ctx context.Context, c *call, _ string) (Outcome, error) {
		return c.probe(ctx, look)
	}}
}

// resolve replaces the result of a COMMIT that was not answered, if it can be
// found out.
func (c *call) resolve(ctx context.Context, unknown result) result {
	if c.opts.Resolver.ask == nil {
		return unknown
	}
	defer c.lap(&c.phases.Resolve)
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), c.m.cfg.ResolveTimeout)
	defer cancel()
	outcome, err := c.poll(ctx, unknown.xid)
	if skipped, ok := c.m.lostReply.Due(); ok {
		c.m.cfg.Logger.WarnContext(ctx, "txretry: COMMIT was not answered", slog.String("name", c.opts.Name),
			slog.Any("found", outcome), slog.Any("error", err), slog.Int("skipped", skipped))
	}
	switch outcome {
	case Committed:
		c.outcome = Committed
		return result{}
	case RolledBack:
		c.outcome = RolledBack
		return result{err: fmt.Errorf("txretry: COMMIT not answered, found rolled back: %w", unknown.lost), phase: PhaseCommit, again: true}
	}
	// What stopped the asking is not what happened to the call: only its text.
	unknown.err = &CommitUnknownError{Name: c.opts.Name, Err: fmt.Errorf("%w (not resolved: %v)", unknown.lost, err)}
	return unknown
}

var errStillOpen = errors.New("not known to have ended within ResolveTimeout")

// poll asks until there is a definite answer, none is to be had, or ctx ends.
// Unknown comes with an error.
func (c *call) poll(ctx context.Context, xid string) (Outcome, error) {
	pauses := backoff.Policy{Base: 5 * time.Millisecond, Max: 250 * time.Millisecond, Jitter: 0.5}
	for n := 0; ; n++ {
		outcome, err := c.opts.Resolver.ask(ctx, c, xid)
		if err == nil && (outcome == Committed || outcome == RolledBack) {
			return outcome, nil
		}
		if errors.Is(err, driver.ErrForgotten) {
			return Unknown, err
		}
		if sleep(ctx, pauses.Delay(n, c.m.cfg.Rand())) != nil {
			if err == nil {
				err = errStillOpen
			}
			return Unknown, err
		}
	}
}

// probe runs look in a transaction that is rolled back.
func (c *call) probe(ctx context.Context, look func(ctx context.Context, tx pgx.Tx) (Outcome, error)) (Outcome, error) {
	s, err := c.m.source.Acquire(ctx, c.limits())
	if err != nil {
		return Unknown, err
	}
	t := new(transaction)
	t.open(ctx, c.m, s, pgx.ReadCommitted, false)
	defer c.release(ctx, t)
	spec := *c.m.begin.spec(beginKey{isolation: pgx.ReadCommitted, lockTimeout: c.opts.LockTimeout})
	spec.Aside = true
	if _, err := s.Begin(ctx, &spec, nil); err != nil {
		return Unknown, err
	}
	outcome, err := look(&t.ctx, &t.root)
	t.close()
	return outcome, err
}
