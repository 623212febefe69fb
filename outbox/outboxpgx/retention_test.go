package outboxpgx_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/internal/pgtest"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
)

// confirming is a Publisher that confirms at once.
type confirming struct{}

func (confirming) Publish(_ context.Context, _ driver.Message, done func(error)) { done(nil) }

// BenchmarkRetention claims and settles messages, 20,000 at a time, beside published ones that are
// kept. "deleting" keeps none.
func BenchmarkRetention(b *testing.B) {
	const n = 20_000
	for name, tc := range map[string]struct {
		retention time.Duration
		kept      int
	}{"deleting": {0, 0}, "marking": {time.Hour, 0}, "beside a million": {time.Hour, 1_000_000}} {
		b.Run(name, func(b *testing.B) {
			pool := pgtest.New(b)
			store, err := outboxpgx.New(pool, outboxpgx.Config{Retention: tc.retention})
			must(b, err)
			must(b, store.Migrate(b.Context()))
			relay, err := outbox.NewRelay(store, confirming{}, outbox.RelayConfig{Logger: quiet})
			must(b, err)
			insert := func(n int, published string) {
				b.Helper()
				_, err := pool.Exec(b.Context(), fmt.Sprintf(`
					INSERT INTO holdfast_outbox (id, lane, name, body, content_type, published_at)
					SELECT overlay(gen_random_uuid()::text PLACING '7' FROM 15)::uuid, n %% 16, 'order.placed', convert_to(to_json(repeat('x', 250))::text, 'UTF8'), 'application/json', %s
					FROM generate_series(1, %d) n`, published, n))
				must(b, err)
			}
			insert(tc.kept, "now()")
			_, err = pool.Exec(b.Context(), `VACUUM ANALYZE holdfast_outbox`)
			must(b, err)
			for b.Loop() {
				b.StopTimer()
				insert(n, "NULL")
				b.StartTimer()
				report, err := relay.Drain(b.Context(), outbox.Bounds{Limit: n})
				must(b, err)
				if report.Published != n {
					b.Fatalf("%+v", report)
				}
			}
			b.ReportMetric(float64(n*b.N)/b.Elapsed().Seconds(), "msg/s")
		})
	}
}
