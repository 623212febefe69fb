package outboxpgx_test

import (
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/pgtest"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
)

// The modes without prepared statements are what old poolers need; they know the types of the
// arguments by their Go types alone.
func TestEveryExecMode(t *testing.T) {
	t.Parallel()
	pgtest.InEveryMode(t, func(t *testing.T, inMode func(*pgxpool.Pool) *pgxpool.Pool) {
		f := setupOn(t, inMode(pgtest.New(t)), outboxpgx.Config{})
		f.store.Claims(driver.Lanes, 0)

		m := outbox.Message{Name: "a", Body: []byte("{}")}
		f.write(t, m)
		f.write(t, m, m)
		batch, err := f.store.Claim(t.Context(), driver.Claim{Limit: 10, Lease: time.Minute})
		must(t, err)
		if len(batch.Messages) != 3 {
			t.Fatalf("claimed %d messages, want 3", len(batch.Messages))
		}
		_, err = f.store.Settle(t.Context(), batch, []driver.Settlement{
			{ID: batch.Messages[0].ID, Verdict: driver.Published},
			{ID: batch.Messages[1].ID, Verdict: driver.Failed, Delay: time.Hour, Class: driver.Retryable, Err: "failed"},
			{ID: batch.Messages[2].ID, Verdict: driver.Dead, Class: driver.Permanent, Err: "dead"},
		})
		must(t, err)
		stats, err := f.store.Depth(t.Context())
		must(t, err)
		if stats.Ready != 0 || stats.Parked != 1 || stats.Dead != 1 {
			t.Errorf("after Settle: %+v", stats)
		}
		letter, err := f.dead.Show(t.Context(), batch.Messages[2].ID)
		must(t, err)
		if n, err := f.dead.Replay(t.Context(), outbox.Filter{IDs: []uuid.UUID{letter.ID}}, outbox.Replay{By: "me"}); n.Returned != 1 || err != nil {
			t.Errorf("retried %d, %v", n, err)
		}
	})
}
