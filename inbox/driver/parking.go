package driver

import (
	"cmp"
	"context"
	"errors"

	"github.com/holdfast-go/holdfast/inbox"
)

// Parker is an optional interface of an inbox.Processor that can stop ordering keys; see
// inbox.ConsumerConfig.ParkKeys. The processor keeps the dead letter that stopped a key, stores each later message of
// the key behind it, and processes these when the letter is returned or dropped. It does so while Background runs.
type Parker interface {
	// Park gives the processor the settings of one of its consumers, with their defaults. The consumer calls it
	// before it runs.
	Park(cfg inbox.ConsumerConfig)
	// Parked returns the dead letters that stopped their keys; nil if the processor cannot stop keys. Return makes one
	// a message again in its place, with Attempt 1 and Replays one higher.
	Parked() Letters
	// Stop keeps a dead letter, which stops its ordering key. It is durable when Stop returns nil, and the consumer then
	// acknowledges the message. If another dead letter has stopped the key, the message waits behind it. If the
	// message is kept already, or was processed by another copy, Stop changes nothing. It bounds its own time.
	Stop(ctx context.Context, dead inbox.DeadLetter) error
}

// ParkerOf returns the Parker of a processor where ConsumerConfig.ParkKeys asks for it; nil where there is none.
func ParkerOf(p inbox.Processor, cfg inbox.ConsumerConfig) Parker {
	parker, ok := p.(Parker)
	if !ok || !cfg.ParkKeys || parker.Parked() == nil {
		return nil
	}
	return parker
}

// ParkedBy returns the dead letters that stopped their keys; nil where keys are not stopped.
func ParkedBy(p inbox.Processor, cfg inbox.ConsumerConfig) Letters {
	if parker := ParkerOf(p, cfg); parker != nil {
		return parker.Parked()
	}
	return nil
}

// WithParked adds the dead letters of a Parker, which may be nil, to those of a transport.
func WithParked(transport, p Letters) Letters {
	if p == nil {
		return transport
	}
	return bothLetters{transport, p}
}

// bothLetters are the dead letters of a transport, followed by those that stopped their keys.
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
