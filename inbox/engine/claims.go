package engine

import (
	"context"
	"errors"
	"time"

	"github.com/google/uuid"
)

const (
	// claimTime is for how long the first message of a parked key is this process's, unless that is
	// renewed. So late another process may have it when this one has died.
	claimTime = 30 * time.Second

	// claimRenewal is the time between two renewals. Some of them may fail.
	claimRenewal = 5 * time.Second

	// claimMargin is how much earlier this process takes a claim for over: its handler has that time to
	// return before another process may begin.
	claimMargin = 5 * time.Second

	// claimPatience bounds one renewal. It waits for a connection as long as it is of use.
	claimPatience = 10 * time.Second
)

var (
	errTaken     = errors.New("another process has the parked message")
	errUnrenewed = errors.New("the claim of the parked message could not be renewed")
)

// claim is this process's right to process the first message of a parked key.
type claim struct {
	until time.Time // it is over then, unless it is renewed
	taken bool      // another process has the message

	run context.Context // of the job; nil: none has begun
	end context.CancelCauseFunc
}

// begun returns a context for a job, which ends with the claim.
func (c *claim) begun(now time.Time) context.Context {
	c.run, c.end = context.WithCancelCause(context.Background())
	c.check(now)
	return c.run
}

// check ends the job of a claim that does not hold.
func (c *claim) check(now time.Time) {
	switch {
	case c.run == nil:
	case c.taken:
		c.end(errTaken)
	case !now.Before(c.until):
		c.end(errUnrenewed)
	}
}

// claims keeps the claims of what is in hand. The loop alone uses it.
type claims struct {
	hand    *hand
	keeper  *keeper
	at      time.Time // of the next look; zero: there are none
	renewal bool      // one is under way
}

// renewal is what became of claims that were to be renewed.
type renewal struct {
	messages []uuid.UUID
	kept     []uuid.UUID
	sent     time.Time
	err      error
}

// claimedUntil is when a claim is over that the Parking was asked for at a time.
func claimedUntil(asked time.Time) time.Time { return asked.Add(claimTime - claimMargin) }

// add notes that there is one more.
func (c *claims) add(now time.Time) { c.at = earlier(c.at, now.Add(claimRenewal)) }

// tend has all claims renewed, and ends the jobs of those that are over.
func (c *claims) tend(now time.Time) {
	if c.at.IsZero() || now.Before(c.at) {
		return
	}
	c.at = time.Time{}
	var messages []uuid.UUID
	for it := c.hand.all.head; it != nil; it = it.next {
		if it.claim == nil || it.claim.taken {
			continue
		}
		it.claim.check(now)
		messages = append(messages, it.m.ID)
		c.at = earlier(c.at, later(it.claim.until, now))
	}
	if len(messages) == 0 {
		return
	}
	c.add(now)
	if !c.renewal {
		c.renewal = true
		c.keeper.renewals <- messages // it has a place
	}
}

// renewed takes the answer of the Parking. A claim that was made since then is not in question.
func (c *claims) renewed(r renewal, now time.Time) {
	c.renewal = false
	if r.err != nil { // the next look asks again
		return
	}
	asked, kept := setOf(r.messages), setOf(r.kept)
	for it := c.hand.all.head; it != nil; it = it.next {
		if it.claim == nil || !asked[it.m.ID] || it.claim.until.After(claimedUntil(r.sent)) {
			continue
		}
		if kept[it.m.ID] {
			it.claim.until = claimedUntil(r.sent)
		} else {
			it.claim.taken = true
		}
		it.claim.check(now)
	}
}

func setOf(all []uuid.UUID) map[uuid.UUID]bool {
	set := make(map[uuid.UUID]bool, len(all))
	for _, id := range all {
		set[id] = true
	}
	return set
}
