package inboxpgx_test

import (
	"testing"

	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
	"github.com/holdfast-go/holdfast/internal/pgtest"
)

// The table may be partitioned by the administrator. Rows of two partitions can have the same tuple id then, and
// only what has outlived the retention, and waits nowhere, is pruned all the same.
func TestPrunePartitioned(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	createTables(t, pool)
	for _, sql := range []string{
		`ALTER TABLE holdfast_inbox RENAME TO plain`,
		`CREATE TABLE holdfast_inbox (LIKE plain INCLUDING DEFAULTS, PRIMARY KEY (consumer, message_id)) PARTITION BY HASH (consumer, message_id)`,
		`CREATE TABLE entries_0 PARTITION OF holdfast_inbox FOR VALUES WITH (MODULUS 2, REMAINDER 0)`,
		`CREATE TABLE entries_1 PARTITION OF holdfast_inbox FOR VALUES WITH (MODULUS 2, REMAINDER 1)`,
		`CREATE INDEX ON holdfast_inbox (consumer, processed_at)`,
		`INSERT INTO holdfast_inbox (consumer, message_id, processed_at)
			SELECT 'a', gen_random_uuid(), now() - CASE WHEN n % 2 = 0 THEN interval '9 days' ELSE interval '1 day' END FROM generate_series(1, 2000) n`,
	} {
		if _, err := pool.Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	parkEntries(t, pool, `processed_at < now() - interval '8 days' AND hashtext(message_id::text) % 2 = 0`)
	var parked int
	if err := pool.QueryRow(t.Context(), `SELECT count(*) FROM holdfast_inbox_parked`).Scan(&parked); err != nil || parked == 0 {
		t.Fatalf("%d parked, error %v", parked, err)
	}
	n, err := newStore(t, newManager(t, pool), "a", inboxpgx.Config{}).Prune(t.Context())
	var young, old int
	if err == nil {
		err = pool.QueryRow(t.Context(), `SELECT count(*) FILTER (WHERE processed_at > now() - interval '8 days'), count(*) FILTER (WHERE processed_at <= now() - interval '8 days')
			FROM holdfast_inbox`).Scan(&young, &old)
	}
	if err != nil || n != 1000-parked || young != 1000 || old != parked {
		t.Errorf("pruned %d (%v), left are %d of 1,000 that are young, and %d old ones, of which %d wait", n, err, young, old, parked)
	}
}
