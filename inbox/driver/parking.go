package driver

import (
	"context"

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
	Parked() DeadLetters
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
func ParkedBy(p inbox.Processor, cfg inbox.ConsumerConfig) DeadLetters {
	if parker := ParkerOf(p, cfg); parker != nil {
		return parker.Parked()
	}
	return nil
}
