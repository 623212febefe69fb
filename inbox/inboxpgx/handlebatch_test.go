package inboxpgx_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
	"github.com/holdfast-go/holdfast/inbox/inboxtest/conformance"
)

func TestHandleBatch(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	p := newStore(t, newManager(t, pool), "a", inboxpgx.Config{})
	var mu sync.Mutex
	var sizes []int
	err := inboxpgx.HandleBatch(p, conformance.Name, func(ctx context.Context, tx pgx.Tx, items []inboxpgx.Item[conformance.Event]) error {
		mu.Lock()
		sizes = append(sizes, len(items))
		mu.Unlock()
		rows := make([][]any, len(items))
		for i, item := range items {
			rows[i] = []any{"a", item.Value.Number, item.Message.ID}
		}
		if _, err := tx.CopyFrom(ctx, pgx.Identifier{"effects"}, []string{"consumer", "number", "message_id"}, pgx.CopyFromRows(rows)); err != nil {
			return err
		}
		for _, item := range items {
			if item.Value.Number == 5 {
				return inbox.Unrecoverable(errors.New("five"))
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	msgs := events(16)
	results := p.Process(t.Context(), msgs)
	if got := failedOnes(results); !slices.Equal(got, []int{5}) || driver.Classify(results[5]).Action != driver.ActionDead {
		t.Errorf("results %v", results)
	}
	if want := []int{16, 16, 8, 4, 4, 2, 1, 1, 2, 8}; !slices.Equal(sizes, want) {
		t.Errorf("called with %v messages, want %v", sizes, want)
	}
	if got := numbersTaken(t, pool); len(got) != 15 {
		t.Errorf("effects of %v", got)
	}
	if err := process(t, p, numbered(100)); err != nil || sizes[len(sizes)-1] != 1 {
		t.Errorf("a single message: %v, sizes %v", err, sizes)
	}
}

// Another name in between ends a call; the order stays.
func TestHandleBatchNeighbours(t *testing.T) {
	t.Parallel()
	p, _ := fakeStore(t)
	var trail []string
	err := inboxpgx.HandleBatch(p, conformance.Name, func(_ context.Context, _ pgx.Tx, items []inboxpgx.Item[conformance.Event]) error {
		trail = append(trail, fmt.Sprintf("%d from %d", len(items), items[0].Value.Number))
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := inboxpgx.Handle(p, "other", func(_ context.Context, _ pgx.Tx, e conformance.Event) error {
		trail = append(trail, fmt.Sprintf("other %d", e.Number))
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	msgs := events(6)
	msgs[2].Name = "other"
	if err := errors.Join(p.Process(t.Context(), msgs)...); err != nil {
		t.Fatal(err)
	}
	if got := strings.Join(trail, ", "); got != "2 from 0, other 2, 3 from 3" {
		t.Error(got)
	}
}
