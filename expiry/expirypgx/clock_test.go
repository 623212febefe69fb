package expirypgx_test

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/expiry"
	"github.com/holdfast-go/holdfast/expiry/expirypgx"
	"github.com/holdfast-go/holdfast/internal/pgtest"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// skewed is a backend whose database clock differs from this host's: functions of
// its schema stand in front of those of Postgres.
func skewed(t *testing.T, ahead time.Duration) *backend {
	t.Helper()
	u, err := url.Parse(pgtest.URL(t))
	if err != nil {
		t.Fatal(err)
	}
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
type statements struct {
	n      atomic.Int64
	looked atomic.Bool
}

func (s *statements) TraceQueryStart(ctx context.Context, _ *pgx.Conn, q pgx.TraceQueryStartData) context.Context {
	if !strings.HasPrefix(q.SQL, "-- ping") {
		s.n.Add(1)
		s.looked.Store(strings.HasPrefix(q.SQL, "SELECT clock_timestamp()"))
	}
	return ctx
}

func (*statements) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// After its start an idle sweeper is quiet: with nothing due it sends nothing
// before the next look, holds with time to spare included.
func TestIdleSweeperIsQuiet(t *testing.T) {
	t.Parallel()
	testenv.Nightly(t, "watches five idle seconds")
	b := newBackend(t)
	b.Put(t, "later", "held", time.Hour)
	cfg, err := pgxpool.ParseConfig(b.pool.Config().ConnString())
	if err != nil {
		t.Fatal(err)
	}
	var sent statements
	cfg.ConnConfig.Tracer = &sent
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	traced := &backend{pool: pool}
	store := traced.store(t, expirypgx.Config{PollOnly: true}) // a connection that listens tests itself
	sw, err := expiry.NewSweeper(store, quiet())
	if err != nil {
		t.Fatal(err)
	}
	background(t, sw.Run)
	eventually(t, func() error {
		if !sent.looked.Load() {
			return errors.New("the look that ends the start is not to be seen")
		}
		return nil
	})
	before := sent.n.Load()
	for range 50 { // that nothing is sent shows in time alone
		store.Wake(time.Now().Add(15 * time.Minute))
		time.Sleep(100 * time.Millisecond)
	}
	if n := sent.n.Load() - before; n > 0 {
		t.Errorf("five idle seconds cost %d statements", n)
	}
	store.Wake(time.Time{})
	eventually(t, func() error {
		if n := sent.n.Load() - before; n != 1 {
			return fmt.Errorf("a look is %d statements", n)
		}
		return nil
	})
	before = sent.n.Load()
	if r, err := sw.Sweep(t.Context()); err != nil || r.Claimed > 0 {
		t.Fatalf("got %+v, %v, want nothing due", r, err)
	}
	n := sent.n.Load() - before
	t.Logf("a sweep with nothing due is %d statements", n)
	if n < 1 || n > 3 { // begin, claim, commit: 40 looks and two sweeps stay below 60 an hour
		t.Errorf("a sweep with nothing due is %d statements", n)
	}
}
