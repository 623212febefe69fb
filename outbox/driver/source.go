package driver

import (
	"context"
	"hash/fnv"
	"time"

	"github.com/google/uuid"
)

// Lanes is the number of lanes every store has. Messages with the same
// ordering key share a lane, the others are spread evenly.
//
// It is part of the stored format: all writers and relays of a table must agree on it.
const Lanes = 16

// LaneOf returns the lane of a message, 0 to Lanes-1. The message must have its id.
func LaneOf(m Message) int {
	h := fnv.New32a()
	if m.Key != "" {
		h.Write([]byte(m.Key))
	} else {
		h.Write(m.ID[:])
	}
	sum := h.Sum32()
	return int((sum ^ sum>>16) % Lanes) // the low bits of FNV alone are weak
}

// Source is the store as a relay sees it. Messages lie in lanes; a relay leases whole lanes,
// publishes what it was given and settles. Every lease carries a fencing token, so that a relay
// that was paused for longer than its lease can change nothing when it wakes up. The package
// outbox/outboxtest/conformance has the suite that an implementation must pass.
//
// All methods are safe for concurrent use by any number of relays in any number of processes.
type Source interface {
	// Claim leases some of the lanes that nobody holds and that have ready messages, and returns
	// ready messages of those lanes in stored order. A Batch without messages has no leases: there is
	// nothing to do now, unless it says More.
	//
	// Ready is a message that is committed, not published, not waiting for its next attempt, of a
	// transport not in c.Skip, and not behind a message of its key, stored before it,
	// that waits for its next attempt. A message waits for its first attempt until its NotBefore.
	//
	// On an error lanes may be held all the same, until their lease ends; calling again is safe.
	Claim(ctx context.Context, c Claim) (Batch, error)

	// Renew makes leases last for ttl from now, if no other relay has taken their lanes meanwhile,
	// run out or not. Those that are no longer held are returned in stale.
	Renew(ctx context.Context, leases []Lease, ttl time.Duration) (stale []Lease, err error)

	// Settle records the settlements and releases the batch's leases, all in one transaction, and looks at
	// the lanes after that. A message without a settlement is given back as it was. A lease that is no longer
	// held, because it ran out and another relay took the lane or because it was settled before, is stale:
	// nothing was changed for the messages of that lane. On an error nothing was changed at all, or it is not
	// known whether it was; calling again is safe.
	Settle(ctx context.Context, b Batch, settlements []Settlement) (Settled, error)
}

// Settled is what came of a Settle.
type Settled struct {
	// Stale are the leases that were no longer held.
	Stale []Lease
	// More says that some message of the batch's lanes was ready after their release, or might have been. Where it is
	// false, whoever commits one later and wakes a relay finds the lanes released.
	More bool
	// Refused is that of a Batch: some settlements could not be recorded, of this batch or of earlier ones.
	Refused error
}

// Claim says what a relay wants.
type Claim struct {
	// Limit is the most messages to return, at least 1.
	Limit int
	// Lease is for how long the lanes are taken, more than 0.
	Lease time.Duration
	// Skip names transports whose messages are left alone.
	Skip []string
	// Alone says that the relay has no other batch in hand. Only then is it given messages under
	// suspicion.
	Alone bool
}

// Batch is what a Claim took.
type Batch struct {
	// Leases are the lanes taken. They are kept by Renew and released by Settle, or run out.
	Leases []Lease
	// Messages are in stored order within each ordering key.
	Messages []Message
	// Unreadable says of some of the Messages, by index, why they could not be decoded; they have their
	// ID, and whatever else could be. They are not published, and fail as Permanent.
	Unreadable map[int]error
	// Due is the time until the next message that waits for an attempt is ready, or until the first lease
	// of another claim ends, whichever is sooner. 0: there is neither. A store that brings messages back in
	// portions leaves at most 200 ms between two.
	Due time.Duration
	// More says that another claim at once may find messages, in other lanes or because this one has
	// put aside what was in the way. Where it is false, a relay claims again when a batch of its own
	// has ended that was not published whole, or left more, or when it is woken.
	More bool
	// Suspect says that the messages are under suspicion, and that nothing else should be published
	// beside them; or, where the relay was not Alone, that there are such messages.
	Suspect bool
	// Refused says why the store cannot record the outcomes of some messages, or sees none. It returns such messages from no
	// claim, so that they are not published again, and tries to record the outcomes later. It is nil where all is well.
	Refused error
	// Unsettled is how many claims in a row, of exactly this message alone, ended without being
	// settled. It is 0 in a Batch of several.
	Unsettled int
}

// Lease is one lane held by one claim.
type Lease struct {
	// Lane is 0 to Lanes-1.
	Lane int
	// Token is of this claim alone: no other claim of the lane ever has it, not even after the store
	// has crashed and forgotten this one.
	Token int64
}

// Verdict is what becomes of a claimed message.
type Verdict int

// The verdicts. The zero Verdict is not valid.
const (
	// Published means confirmed by the broker: the message is deleted, or kept with its
	// time of publication where the store has a retention.
	Published Verdict = iota + 1
	// Failed means that the attempt is counted and the message waits for Settlement.Delay. Later
	// messages of its key wait with it.
	Failed
	// Dead means that the attempt is counted and the message moves to the dead letters, where it
	// replaces an older one with its id. Later messages of its key go on.
	Dead
)

// Settlement is the verdict on one claimed message.
type Settlement struct {
	ID      uuid.UUID
	Verdict Verdict
	// Delay is the time until the next attempt of a Failed message.
	Delay time.Duration
	// Class and Err say why a message Failed or is Dead. Err is at most 1,000 bytes of UTF-8.
	Class Class
	Err   string
}
