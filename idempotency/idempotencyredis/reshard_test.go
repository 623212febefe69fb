package idempotencyredis_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/idempotencyredis"
	"github.com/holdfast-go/holdfast/internal/redistest"
)

// A slot that moves to another node while a run ends does not cost its result:
// as long as one of the two keys is there and the other one is not, no script can
// run on them.
func TestSlotMovesDuringARun(t *testing.T) {
	t.Parallel()
	client, servers := redistest.Cluster(t)
	s := newStore(t, client, idempotencyredis.Config{})
	move := redistest.NewMove(t, client, servers, "{"+string(key)+"}")
	moved := make(chan error, 1)
	got, _, err := idempotency.Do(t.Context(), s, idempotency.Key(key), nil, func(ctx context.Context) (int, error) {
		err := move.Begin(ctx)
		time.AfterFunc(300*time.Millisecond, func() { moved <- errors.Join(move.Keys(t.Context()), move.End(t.Context())) })
		return 7, err
	})
	if err := errors.Join(err, <-moved); err != nil || got != 7 {
		t.Fatalf("Do = %d, %v", got, err)
	}
	got, replayed, err := idempotency.Do(t.Context(), s, idempotency.Key(key), nil, func(context.Context) (int, error) { return 8, nil })
	if err != nil || !replayed || got != 7 {
		t.Errorf("again: %d, %v, %v", got, replayed, err)
	}
}
