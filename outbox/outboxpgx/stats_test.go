package outboxpgx_test

import (
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
)

func TestStatsAreBounded(t *testing.T) {
	t.Parallel()
	testenv.Nightly(t, "300,000 rows")
	f := setup(t, outboxpgx.Config{Retention: time.Hour})
	_, err := f.pool.Exec(t.Context(), `
		INSERT INTO holdfast_outbox (id, lane, name, body, content_type, created_at, published_at, due_at, attempts)
		SELECT gen_random_uuid(), n % 16, 'a', '1', 'application/json', now() - interval '1 minute',
		       CASE n % 3 WHEN 0 THEN now() END, CASE n % 3 WHEN 1 THEN now() + interval '1 hour' END, 1
		FROM generate_series(1, 303000) n`)
	must(t, err)
	stats, err := f.store.Depth(t.Context())
	must(t, err)
	if stats.Ready != driver.StatsLimit || stats.Parked != driver.StatsLimit || stats.Dead != 0 {
		t.Errorf("%+v", stats)
	}
	if stats.OldestAge < time.Minute || stats.OldestAge > 5*time.Minute {
		t.Errorf("the oldest is %v old", stats.OldestAge)
	}
}

// A letter that waits for an hour that somebody chose is not late, one that failed is.
func TestOldestAgeOfWaitingMessages(t *testing.T) {
	t.Parallel()
	f := setup(t, outboxpgx.Config{})
	_, err := f.pool.Exec(t.Context(), `
		INSERT INTO holdfast_outbox (id, lane, name, body, content_type, created_at, due_at, attempts)
		SELECT gen_random_uuid(), 0, 'a', '1', 'application/json', now() - n * interval '1 hour', now() + interval '1 day', 2 - n
		FROM generate_series(1, 2) n`)
	must(t, err)
	stats, err := f.store.Depth(t.Context())
	must(t, err)
	if stats.Parked != 2 || stats.OldestAge < time.Hour || stats.OldestAge > time.Hour+time.Minute {
		t.Errorf("%+v", stats)
	}
}
