package driver

import (
	"context"
	"hash/fnv"
	"time"

	"github.com/google/uuid"
)

// Lanes is the number of lanes of every store. Messages with the same ordering key share a lane; the
// others are spread evenly.
//
// It is part of the stored format: all writers and relays of a table must use the same number.
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

// Source is the store interface of a relay. Messages are divided into lanes. A relay leases whole lanes,
// publishes the messages it received and settles them. Every lease has a fencing token. A relay that was
// stopped for longer than its lease therefore cannot change anything when it continues. Package
// outbox/outboxtest/conformance has the test suite that an implementation must pass.
//
// All methods are safe for concurrent use by any number of relays in any number of processes.
type Source interface {
	// Claim leases some of the free lanes that have ready messages, and returns ready messages of those
	// lanes in stored order. A Batch without messages has no leases: nothing can be published now, unless
	// More is set.
	//
	// A message is ready if it is committed, not published, not waiting for its next attempt, not of a
	// transport in c.Skip, and not behind an earlier message of its key that waits for its next
	// attempt. Until its NotBefore, a message waits for its first attempt.
	//
	// After an error, lanes may stay leased until their lease expires. It is safe to call again.
	Claim(ctx context.Context, c Claim) (Batch, error)

	// Renew extends leases to ttl from now, expired ones too, unless another relay has taken their
	// lanes. It returns the lost leases in stale.
	Renew(ctx context.Context, leases []Lease, ttl time.Duration) (stale []Lease, err error)

	// Settle records the settlements and releases the batch's leases in one transaction. Then it checks the
	// lanes for more messages. A message without a settlement is released unchanged. A lease is stale if it
	// expired and another relay took the lane, or if it was settled before. Settle changes nothing for the
	// messages of a stale lane. After an error, either nothing was changed or the outcome is unknown. It is
	// safe to call again.
	Settle(ctx context.Context, b Batch, settlements []Settlement) (Settled, error)
}

// Settled is the result of a Settle.
type Settled struct {
	// Stale are the leases that were lost before Settle.
	Stale []Lease
	// More is true if a message of the batch's lanes was ready after their release, or might have
	// been. If More is false, a writer that commits a message later and wakes a relay finds the lanes free.
	More bool
	// Refused is like Batch.Refused: some settlements of this or earlier batches could not be recorded.
	Refused error
}

// Claim holds the parameters of a claim.
type Claim struct {
	// Limit is the maximum number of messages to return, at least 1.
	Limit int
	// Lease is the duration of the leases, more than 0.
	Lease time.Duration
	// Skip names transports whose messages are not returned.
	Skip []string
	// Alone is true if the relay has no other batch in flight. Only then does Claim return suspect
	// messages.
	Alone bool
}

// Batch is the result of a Claim.
type Batch struct {
	// Leases are the leased lanes. Renew extends them. They end with Settle or expire.
	Leases []Lease
	// Messages are in stored order within each ordering key.
	Messages []Message
	// Unreadable has the decoding error of each message that could not be decoded, by index in
	// Messages. Such a message has its ID and all fields that could be decoded. The relay does not
	// publish it; it fails as Permanent.
	Unreadable map[int]error
	// Due is the time until the next waiting message is ready, or until the first lease of another
	// claim expires, whichever is sooner. 0 means that there is neither. A store that returns parked
	// messages to ready in portions leaves at most 200 ms between two portions.
	Due time.Duration
	// More is true if another claim may find messages now, in other lanes or because this claim
	// moved blocking messages out of the way. If More is false, the relay claims again in three cases: it is
	// woken, one of its batches ended only partly published, or one ended with more messages ready.
	More bool
	// Suspect is true if the messages may have crashed a relay; nothing else should be published at the
	// same time. If the claim was not Alone, it is true if such messages exist.
	Suspect bool
	// Refused is the reason why the store cannot record the outcomes of some messages, or cannot show
	// any. Claim does not return these messages, so that they are not published again. The store retries
	// recording them later. Nil means that there is no such problem.
	Refused error
	// Unsettled counts the previous claims in a row of exactly this one message that ended without
	// being settled. It is 0 in a Batch of several messages.
	Unsettled int
}

// Lease is a time-limited right to one lane, held by one claim.
type Lease struct {
	// Lane is 0 to Lanes-1.
	Lane int
	// Token is unique to this claim: no other claim of the lane ever has it, even if the store crashes
	// and forgets this claim.
	Token int64
}

// Verdict is the outcome of a claimed message.
type Verdict int

// The verdicts. The zero Verdict is invalid.
const (
	// Published means confirmed by the broker. The message is deleted, or kept with its time of
	// publication if the store has a retention.
	Published Verdict = iota + 1
	// Failed means that the attempt is counted and the message waits for Settlement.Delay. Later
	// messages of its key wait too.
	Failed
	// Dead means that the attempt is counted and the message moves to the dead letters, where it
	// replaces an older one with the same id. Later messages of its key continue.
	Dead
)

// Settlement is the outcome of one claimed message.
type Settlement struct {
	ID      uuid.UUID
	Verdict Verdict
	// Delay is the time until the next attempt of a Failed message.
	Delay time.Duration
	// Class and Err are the reason of Failed or Dead. Err is at most 1,000 bytes of UTF-8.
	Class Class
	Err   string
}
