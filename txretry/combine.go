package txretry

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/holdfast-go/holdfast/txretry/driver"
)

// group is the calls that share one transaction (Options.Combine): the leader, which holds the serial key,
// and its followers, which stood in line behind it. The leader begins the transaction, runs its own fn, has
// the followers run theirs one after the other, each on its own goroutine and with a handle of its own, and
// commits.
//
// There are no savepoints. A follower that fails ends the transaction, and the leader begins another one
// with the followers before it. The one that failed leads the next group: its failure then happens in a
// transaction of its own, after the others have committed.
type group struct {
	limit     int     // the number of followers at most
	arrived   uint64  // the last arrival in line before the transaction began
	followers []*turn // that have run their fn; only the last one may have failed
}

// part is how a follower ended its part in the transaction.
type part byte

const (
	partDone    part = iota
	partFailed       // the follower will lead
	partGone         // failed for good: the follower does not return to the line
	partSkipped      // nothing was done: the follower's context had ended, or a tracer has panicked
)

// groupOutcome is what a follower hears at the end of the transaction.
type groupOutcome struct {
	outcome driver.Outcome
	commit  result // of COMMIT, where it was sent
}

var (
	errFollowerFailed = errors.New("txretry: rolled back: another call that shared the transaction failed")
	errGroupFailed    = errors.New("txretry: rolled back with the calls that shared the transaction")
	errLeaderGone     = errors.New("txretry: the call that commits the shared transaction did not return")
	errFollowerEnded  = because("a call that shared the transaction ended it by a statement", ErrManaged, nil)
)

// lead runs a call that holds its serial key.
func (c *call) lead(ctx context.Context) error {
	defer c.m.turns.pass(c.opts.SerialKey)
	defer c.settleGroup(result{err: errLeaderGone}) // a tracer may panic in COMMIT
	c.group.limit = c.opts.Combine - 1
	return c.run(ctx)
}

// startGroup begins a new attempt. A follower must have arrived before it, so that it sees what had
// committed before its call.
func (c *call) startGroup() {
	if c.group.limit > 0 {
		c.group.arrived = c.m.turns.arrived()
	}
}

// runFollowers has the followers run their fn, and reports whether all have succeeded.
func (c *call) runFollowers(ctx context.Context, s driver.Session, p *pending) bool {
	g := &c.group
	for !g.closed(ctx) {
		next := c.m.turns.take(c.opts.SerialKey, c.combines)
		if next == nil {
			break
		}
		next.granted <- grant{s, p}
		next.ended = <-next.part
		if next.ended == partSkipped {
			continue
		}
		g.followers = append(g.followers, next)
		if next.ended != partDone {
			return false
		}
	}
	return true
}

// closed reports that no more may join: the group is full, or the context of a call that waits for COMMIT
// has ended.
func (g *group) closed(leader context.Context) bool {
	late := func(f *turn) bool { return f.ctx.Err() != nil }
	return len(g.followers) >= g.limit || leader.Err() != nil || slices.ContainsFunc(g.followers, late)
}

// combines reports whether the next in line may follow.
func (c *call) combines(next *turn) bool {
	a, b := &c.opts, &next.call.opts
	if next.arrival > c.group.arrived || b.Combine < 2 || b.AtBegin.SQL != "" || a.Witness != nil || b.Witness != nil {
		return false
	}
	return c.beginKey() == next.call.beginKey() && a.CommitTimeout == b.CommitTimeout
}

// followerFailed is the result of an attempt that ended with the last follower.
func (c *call) followerFailed(t *transaction) result {
	if t.session.State() != driver.Idle {
		return result{err: errFollowerFailed, phase: phaseFn}
	}
	c.outcome = driver.Unknown
	res := result{err: &CommitUnknownError{c.opts.Name, errFollowerEnded}, phase: phaseFn}
	if len(t.pending.statements) == 0 { // else it may have committed without them
		res.lost, res.xid = errFollowerEnded, t.session.XID()
	}
	return res
}

// settleGroup tells the followers what became of an attempt. If it was rolled back they stand first in line
// again, and the leader makes another attempt at once, with fewer of them, which does not count as one of
// its own. A failed COMMIT does not tell whose work failed it, so half of them come back.
func (c *call) settleGroup(res result) (again bool) {
	g := &c.group
	followers := g.followers
	if len(followers) == 0 {
		return false
	}
	g.followers = nil
	if again = c.outcome == driver.RolledBack; again {
		if g.limit = len(followers) / 2; followers[len(followers)-1].ended != partDone {
			g.limit = len(followers) - 1
		}
		c.m.turns.putBack(c.opts.SerialKey, followers)
	}
	if unknown, ok := errors.AsType[*CommitUnknownError](res.err); ok {
		res.err = unknown.Err
	}
	for _, f := range followers {
		f.settled <- groupOutcome{c.outcome, res}
	}
	return again
}

// failedShared remembers an attempt in a shared transaction that failed for a transient reason.
func (c *call) failedShared(res result) {
	if res.again {
		c.reported = append(c.reported, Attempt{SQLSTATE: res.sqlstate, Phase: res.phase, Err: res.err})
	}
}

// follow has the call take part in the transaction of its leader. If over is false it is in line again.
func (c *call) follow(ctx context.Context, own *turn, got grant) (over bool, err error) {
	over = true
	var begun, returned bool
	defer func() { // a tracer may panic, and others wait for this call
		switch {
		case !begun:
			own.part <- partSkipped
		case !over && !returned:
			c.m.turns.abandon(own)
		}
	}()
	if ctx.Err() != nil {
		return true, endedInLine(ctx)
	}
	c.attempts++
	res := c.traced(ctx, func(ctx context.Context) result {
		begun = true
		res := c.followerAttempt(ctx, own, got)
		over = !res.again
		return res
	})
	returned = true
	return over, c.explain(res)
}

func endedInLine(ctx context.Context) error {
	return fmt.Errorf("txretry: waiting for the serial key: %w", ended(ctx))
}

// followerAttempt is an attempt in the transaction of the leader. If another one may succeed the call is in
// line for it.
func (c *call) followerAttempt(ctx context.Context, own *turn, got grant) result {
	t := c.transaction(ctx, got.session)
	t.pending = got.pending
	c.last = t
	res, group := c.runPart(t, own)
	c.lap(&c.phases.commit)
	if c.outcome == driver.Unknown { // fn ended the transaction
		return res
	}
	switch c.outcome = group.outcome; {
	case c.outcome == driver.Committed:
		return result{}
	case c.outcome == driver.Unknown:
		return result{err: &CommitUnknownError{Name: c.opts.Name, Err: group.commit.err}, phase: phaseCommit}
	case res.err == nil:
		c.failedShared(group.commit)
		return result{err: errGroupFailed, phase: phaseCommit, again: true, sqlstate: group.commit.sqlstate}
	}
	return res
}

// runPart runs fn and waits for the end of the transaction, also when fn panics.
func (c *call) runPart(t *transaction, own *turn) (res result, group groupOutcome) {
	part := partGone
	defer func() {
		t.done.Store(true)
		if part == partGone && t.session.State() == driver.Idle {
			c.outcome = driver.Unknown
		}
		own.part <- part
		group = <-own.settled
	}()
	res = c.work(t)
	c.failedShared(res)
	switch {
	case res.err == nil:
		part = partDone
	case c.outcome == driver.Unknown: // fn ended the transaction
	case t.ctx.Err() == nil:
		part = partFailed
	case res.again:
		res.err = because("interrupted", ended(&t.ctx), res.err)
	}
	res.again = part == partFailed
	return res, group
}
