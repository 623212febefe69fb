package expirypgx_test

import (
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/expiry"
	"github.com/holdfast-go/holdfast/expiry/expirypgx"
	"github.com/holdfast-go/holdfast/internal/pgtest"
	"github.com/holdfast-go/holdfast/internal/silent"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

const (
	// soonBack is the goal: how long after a fault's end due rows expire again.
	soonBack = 10 * time.Second
)

// cutOff is a sweeper whose pool goes through a proxy, with statements in plain text;
// b.pool reaches the server itself.
func cutOff(t *testing.T) (b *backend, far *backend, proxy *testenv.Proxy) {
	t.Helper()
	b = newBackend(t)
	proxy = testenv.NewProxy(t, b.pool.Config().ConnString())
	far = &backend{pool: pgtest.Pool(t, proxy.URL()+"&default_query_exec_mode=exec", 4), silent: true}
	return b, far, proxy
}

// onSilent runs a test in a bubble: b reaches the real server always, far through connections that fall silent. The
// clock stands still while the server works.
func onSilent(t *testing.T, test func(t *testing.T, s *silent.Postgres, b, far *backend)) {
	t.Helper()
	url := pgtest.URL(t) + "&default_query_exec_mode=exec"
	silent.Today(t, func(t *testing.T) {
		s := silent.NewPostgres(t, url)
		b := backendOn(t, silent.NewPostgres(t, url).Pool(t, 10))
		test(t, s, b, &backend{pool: s.Pool(t, 4), silent: true})
	})
}

// wantBack waits until a row has expired, once, and fails the test if that takes longer than the goal. Times are virtual.
func (b *backend) wantBack(t *testing.T, id string) {
	t.Helper()
	start := time.Now()
	testenv.Eventually(t, func() error {
		if got := b.State(t, id); got != "expired" {
			return fmt.Errorf("row %s is %s", id, got)
		}
		return nil
	})
	if took := time.Since(start); took > soonBack {
		t.Errorf("row %s took %v", id, took)
	}
	if n := b.Announced(t, id); n != 1 {
		t.Errorf("row %s was announced %d times", id, n)
	}
}

// A connection that falls silent at any point of a sweep or of a look delays a row by
// seconds, and accuses none.
func TestSilentAtEachPoint(t *testing.T) {
	t.Parallel()
	pgtest.URL(t) // skips before there are subtests
	for name, on := range map[string]string{
		"begin": "begin", "claim": "FOR UPDATE SKIP LOCKED", "change": "UPDATE", "announce": "INSERT INTO events", "commit": "commit",
		"look": "clock_timestamp()",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			onSilent(t, func(t *testing.T, s *silent.Postgres, b, far *backend) {
				log := &lines{}
				store, sw := far.sweeper(t, expiry.SweeperConfig{Logger: slog.New(slog.NewTextHandler(log, nil))})
				for _, deliver := range []bool{false, true} {
					before, id := s.Silenced(), fmt.Sprint("delivered ", deliver)
					s.SilenceOn(testenv.Silence{On: on, Deliver: deliver})
					b.Put(t, id, "held", 0)
					store.Wake(time.Time{})
					b.wantBack(t, id)
					if strings.Contains(log.String(), "row fails") {
						t.Errorf("%s: the row is accused:\n%s", id, log)
					}
					eventually(t, func() error {
						if s.Silenced() == before {
							return errors.New("no connection fell silent")
						}
						return sw.Ready(t.Context())
					})
				}
			})
		})
	}
}

// All connections of the sweeper and of its listener fall silent: rows that others
// make expire again, and wake-ups arrive.
func TestAllConnectionsSilent(t *testing.T) {
	t.Parallel()
	onSilent(t, func(t *testing.T, s *silent.Postgres, b, far *backend) {
		far.sweeper(t, expiry.SweeperConfig{})
		listening(t, b)
		other := b.store(t, expirypgx.Config{})
		s.SilenceConnections()
		for _, id := range []string{"during", "afterwards"} {
			hold(t, other, id, 0)
			b.wantBack(t, id)
		}
	})
}

// A server that says nothing any more does not hold up the end.
func TestEndWhileTheServerIsSilent(t *testing.T) {
	t.Parallel()
	pgtest.URL(t) // skips before there are subtests
	for _, on := range []string{"UPDATE", "commit", "clock_timestamp()"} {
		t.Run(on, func(t *testing.T) {
			t.Parallel()
			onSilent(t, func(t *testing.T, s *silent.Postgres, b, far *backend) {
				store := far.store(t, expirypgx.Config{Emit: announceAll(far)})
				sw, err := expiry.NewSweeper(store, expiry.SweeperConfig{Logger: slog.New(slog.DiscardHandler)})
				if err != nil {
					t.Fatal(err)
				}
				stop := background(t, sw.Run)
				eventually(t, func() error { return sw.Ready(t.Context()) })
				listening(t, b)
				s.SilenceOn(testenv.Silence{On: on, Connections: 100})
				b.Put(t, "row", "held", 0)
				store.Wake(time.Time{})
				eventually(t, func() error {
					if s.Silenced() == 0 {
						return errors.New("no connection is silent yet")
					}
					return nil
				})
				start := time.Now()
				stop()
				if took := time.Since(start); took > 10*time.Second { // the default of ShutdownTimeout
					t.Errorf("it took %v", took)
				}
			})
		})
	}
}
