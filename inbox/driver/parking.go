package driver

import (
	"cmp"
	"context"
	"errors"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/inbox"
)

// Parking keeps ordering keys that wait, outside the broker: the dead letter that has stopped a key,
// and behind it each message of the key that has arrived since, in that order. When the letter is
// returned or dropped its key goes on: the consumer runs what is here, one after the other, and the
// key is free with the last one.
//
// A Parking belongs to one consumer, and has each message id once. inboxpgx keeps it in Postgres,
// inboxtest in memory; the suite is in inboxtest/conformance. It must be safe for concurrent use,
// and each call returns within a limit of its own.
type Parking interface {
	// Letters are the dead letters that have stopped their keys. Return makes one a message again
	// in its place, with Attempt 1 and Replays one higher.
	Letters
	// Stop keeps a dead letter, which stops its key: at the key's end, or in its message's place
	// where that is here already and has no owner. A copy from before a Return changes nothing.
	Stop(ctx context.Context, key string, dead inbox.DeadLetter) error
	// Append keeps a message at the end of its key, unless its id is here already.
	Append(ctx context.Context, key string, m *inbox.Message) error
	// Heads returns the keys that have messages here, in the order of their bytes: those after a
	// key, at most so many.
	Heads(ctx context.Context, after string, most int) ([]Head, error)
	// Count returns how many messages are here, dead letters included; it counts to most at most.
	Count(ctx context.Context, most int) (int, error)

	// Claim leases the first message of a key to an owner and returns it: nil for a dead letter, and
	// for what another owner has. There says whether the key has any. An owner may claim again what it
	// has. The lease is by the clock of the place, from a moment of the call on.
	Claim(ctx context.Context, key string, l Lease) (m *inbox.Message, there bool, err error)
	// Renew prolongs an owner's leases of messages, also those that are over, unless another owner has
	// claimed them since. It returns which are the owner's. A Lease.For of zero gives them up.
	Renew(ctx context.Context, l Lease, messages []uuid.UUID) (kept []uuid.UUID, err error)
	// Fail makes a message that the owner has claimed the dead letter that stops its key. It returns
	// ErrStale, and changes nothing, where the message is not the owner's any more.
	Fail(ctx context.Context, owner uuid.UUID, dead inbox.DeadLetter) error
	// Done deletes a message that the owner has claimed and that has taken effect, or is a leftover.
	// A copy from before a Return, and one that is not the owner's any more, change nothing.
	Done(ctx context.Context, owner uuid.UUID, m *inbox.Message) error
}

// Lease says who may process messages of a Parking, and for how long. One that is over is still the
// owner's until another one claims the message.
type Lease struct {
	// Owner is one run of a consumer.
	Owner uuid.UUID
	// For is how long no other owner may claim the message.
	For time.Duration
}

// Head is a key that has messages in a Parking.
type Head struct {
	Key string
	// Stopped says that its first message is a dead letter.
	Stopped bool
}

// Parker is an optional interface of an inbox.Processor that can keep ordering keys that wait.
type Parker interface {
	// Parking is where they are; nil when there is none. Used says whether a consumer of the processor
	// parks keys: those that were parked before are left behind where none does.
	Parking(used bool) Parking
}

// ParkingOf returns the Parking of a processor where ConsumerConfig.ParkKeys asks for it; nil where
// there is none.
func ParkingOf(p inbox.Processor, cfg inbox.ConsumerConfig) Parking {
	parker, ok := p.(Parker)
	if !ok {
		return nil
	}
	place := parker.Parking(cfg.ParkKeys)
	if !cfg.ParkKeys {
		return nil
	}
	return place
}

// WithParked adds the dead letters of a Parking, which may be nil, to those of a transport.
func WithParked(transport Letters, p Parking) Letters {
	if p == nil {
		return transport
	}
	return bothLetters{transport, p}
}

// bothLetters are the dead letters of a transport and then those that are parked.
type bothLetters struct{ transport, parked Letters }

// Depths implements Letters.
func (b bothLetters) Depths(ctx context.Context) ([]Depth, error) {
	all, err := b.transport.Depths(ctx)
	if err != nil {
		return nil, err
	}
	parked, err := b.parked.Depths(ctx)
	if err != nil {
		return nil, err
	}
	return merged(all, parked), nil
}

// merged adds up depths, both sorted by class.
func merged(a, b []Depth) (all []Depth) {
	for len(a) > 0 && len(b) > 0 {
		switch {
		case a[0].Class < b[0].Class:
			all, a = append(all, a[0]), a[1:]
		case b[0].Class < a[0].Class:
			all, b = append(all, b[0]), b[1:]
		default:
			all, a, b = append(all, sum(a[0], b[0])), a[1:], b[1:]
		}
	}
	return append(append(all, a...), b...)
}

func sum(a, b Depth) Depth {
	oldest := a.Oldest
	if a.Messages == 0 || b.Messages > 0 && b.Oldest.Before(oldest) {
		oldest = b.Oldest
	}
	return Depth{Class: a.Class, Messages: a.Messages + b.Messages, Held: a.Held || b.Held, Oldest: oldest}
}

// Scan implements Letters.
func (b bothLetters) Scan(
	ctx context.Context, class string, visit func(*inbox.DeadLetter) (Fate, error), failed func(inbox.DeadLetter, error),
) error {
	done := false
	noting := func(dead *inbox.DeadLetter) (Fate, error) {
		fate, err := visit(dead)
		done = errors.Is(err, ErrDone)
		return fate, err
	}
	held := b.transport.Scan(ctx, class, noting, failed)
	if held != nil && !errors.Is(held, inbox.ErrHeld) || done {
		return held
	}
	return cmp.Or(b.parked.Scan(ctx, class, visit, failed), held)
}
