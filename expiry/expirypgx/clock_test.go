package expirypgx_test

import (
	"context"
	"fmt"
	"net/url"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/expiry"
	"github.com/holdfast-go/holdfast/expiry/driver"
	"github.com/holdfast-go/holdfast/expiry/expirypgx"
	"github.com/holdfast-go/holdfast/internal/pgtest"
)

// skewed is a backend whose database clock differs from this host's: functions of
// its schema stand in front of those of Postgres.
func skewed(t *testing.T, ahead time.Duration) *backend {
	t.Helper()
	u, err := url.Parse(pgtest.URL(t))
	must(t, err)
	query := u.Query()
	query.Set("search_path", query.Get("search_path")+",pg_catalog")
	u.RawQuery = query.Encode()
	b := &backend{pool: pgtest.Pool(t, u.String(), 10)}
	for _, f := range []string{"now", "clock_timestamp"} {
		b.exec(t, fmt.Sprintf(`CREATE FUNCTION %s() RETURNS timestamptz LANGUAGE sql STABLE AS 'SELECT pg_catalog.%s() + interval ''%d s'''`,
			f, f, int(ahead.Seconds())))
	}
	b.exec(t, schema)
	return b
}

// Five minutes of skew to either side change nothing: the database's clock
// decides, and the wake-up of another process goes by it too.
func TestClockSkew(t *testing.T) {
	t.Parallel()
	for _, ahead := range []time.Duration{5 * time.Minute, -5 * time.Minute} {
		t.Run(ahead.String(), func(t *testing.T) {
			t.Parallel()
			b := skewed(t, ahead)
			o, err := b.store(t, expirypgx.Config{}).Look(t.Context(), nil)
			if off := time.Until(o.Now) - ahead; err != nil || off.Abs() > time.Minute {
				t.Fatalf("the database's clock is not skewed: %v, %v", off, err)
			}
			store, _ := b.sweeper(t, expiry.SweeperConfig{})
			listening(t, b)
			hold(t, store, "woken", time.Second)
			hold(t, elsewhere(t, b), "notified", time.Second)
			hold(t, store, "later", 10*time.Minute)
			if late := b.latest(t, 2); late < 0 {
				t.Errorf("expired %v before the deadline by the database's clock", -late)
			}
			if got := b.State(t, "later"); got != "held" {
				t.Errorf("the row that has ten minutes is %s", got)
			}
		})
	}
}

// statements counts what a pool sends.
type statements struct{ n atomic.Int64 }

func (s *statements) TraceQueryStart(ctx context.Context, _ *pgx.Conn, q pgx.TraceQueryStartData) context.Context {
	if !strings.HasPrefix(q.SQL, "-- ping") {
		s.n.Add(1)
	}
	return ctx
}

func (*statements) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// A look is one statement, and a sweep with nothing due is begin, claim and commit. How often an idle sweeper does either:
// TestIdleCostsAtMostOneQueryAMinute of expiry.
func TestIdleStatements(t *testing.T) {
	t.Parallel()
	b := newBackend(t)
	b.Put(t, "later", "held", time.Hour)
	cfg := b.pool.Config()
	var sent statements
	cfg.ConnConfig.Tracer = &sent
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	must(t, err)
	t.Cleanup(pool.Close)
	store := (&backend{pool: pool}).store(t, expirypgx.Config{PollOnly: true})
	_, err = store.Look(t.Context(), nil)
	must(t, err)
	if n := sent.n.Swap(0); n != 1 {
		t.Errorf("a look is %d statements", n)
	}
	batch, err := store.SweepBatch(t.Context(), driver.Request{Limit: 10})
	if n := sent.n.Load(); err != nil || batch.Claimed > 0 || n < 1 || n > 3 {
		t.Errorf("a batch with nothing due is %d statements: %+v, %v", n, batch, err)
	}
}
