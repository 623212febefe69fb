package operator

import (
	"context"
	"fmt"

	"github.com/holdfast-go/holdfast/inbox"
)

// turn is held by who looks at the dead letters of a consumer.
type turn chan struct{}

// inTurns has those who look at dead letters wait for each other. RabbitMQ hands out each letter once: of two who look
// at the same time each would see a part, and count too few.
type inTurns struct {
	inbox.DeadLetters
	turn turn
}

func (l inTurns) List(ctx context.Context, f inbox.Filter) ([]inbox.DeadLetter, error) {
	return inTurn(ctx, l.turn, func() ([]inbox.DeadLetter, error) { return l.DeadLetters.List(ctx, f) })
}

func (l inTurns) Count(ctx context.Context, f inbox.Filter) (int, error) {
	return inTurn(ctx, l.turn, func() (int, error) { return l.DeadLetters.Count(ctx, f) })
}

func (l inTurns) Groups(ctx context.Context, f inbox.Filter) ([]inbox.Group, error) {
	return inTurn(ctx, l.turn, func() ([]inbox.Group, error) { return l.DeadLetters.Groups(ctx, f) })
}

// Replay waits where it is a look. Others may be paced, and take hours.
func (l inTurns) Replay(ctx context.Context, f inbox.Filter, how inbox.Replay) (inbox.Replayed, error) {
	if !how.DryRun {
		return l.DeadLetters.Replay(ctx, f, how)
	}
	return inTurn(ctx, l.turn, func() (inbox.Replayed, error) { return l.DeadLetters.Replay(ctx, f, how) })
}

func inTurn[T any](ctx context.Context, t turn, look func() (T, error)) (T, error) {
	select {
	case t <- struct{}{}:
		defer func() { <-t }()
		return look()
	case <-ctx.Done():
		var none T
		return none, fmt.Errorf("others look at these dead letters: %w", ctx.Err())
	}
}
