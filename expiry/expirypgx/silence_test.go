package expirypgx_test

import (
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/expiry"
	"github.com/holdfast-go/holdfast/expiry/expirypgx"
	"github.com/holdfast-go/holdfast/internal/pgtest"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

const (
	// soonBack is the goal: how long after a fault's end due rows expire again.
	soonBack = 10 * time.Second
	// busy is what a machine that is busy with other tests may add to it.
	busy = 20 * time.Second
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

// back waits until a row has expired, once, and tells how long that took.
func (b *backend) back(t *testing.T, id string, since time.Time) {
	t.Helper()
	testenv.Eventually(t, func() error {
		if got := b.State(t, id); got != "expired" {
			return fmt.Errorf("row %s is %s", id, got)
		}
		return nil
	})
	took := time.Since(since)
	t.Logf("expired after %v", took.Round(10*time.Millisecond))
	if took > soonBack+busy {
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
	for name, on := range map[string]string{
		"begin": "begin", "claim": "FOR UPDATE SKIP LOCKED", "change": "UPDATE", "announce": "INSERT INTO events", "commit": "commit",
		"look": "clock_timestamp()",
	} {
		for _, deliver := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, delivered %v", name, deliver), func(t *testing.T) {
				t.Parallel()
				b, far, proxy := cutOff(t)
				log := &lines{}
				store, sw := far.sweeper(t, expiry.SweeperConfig{Logger: slog.New(slog.NewTextHandler(log, nil))})
				proxy.SilenceOn(testenv.Silence{On: on, Deliver: deliver})
				b.Put(t, "row", "held", 0)
				start := time.Now()
				store.Wake(time.Time{})
				b.back(t, "row", start)
				if strings.Contains(log.String(), "row fails") {
					t.Errorf("the row is accused:\n%s", log)
				}
				if proxy.Silenced() == 0 {
					t.Error("no connection fell silent")
				}
				eventually(t, func() error { return sw.Ready(t.Context()) })
			})
		}
	}
}

// All connections of the sweeper and of its listener fall silent: rows that others
// make expire again, and wake-ups arrive.
func TestAllConnectionsSilent(t *testing.T) {
	t.Parallel()
	b, far, proxy := cutOff(t)
	far.sweeper(t, expiry.SweeperConfig{})
	listening(t, b)
	other := elsewhere(t, b)
	proxy.SilenceConnections()
	start := time.Now()
	hold(t, other, "during", time.Second)
	b.back(t, "during", start)
	start = time.Now()
	hold(t, other, "afterwards", time.Second)
	b.back(t, "afterwards", start)
}

// A server that says nothing any more does not hold up the end.
func TestEndWhileTheServerIsSilent(t *testing.T) {
	t.Parallel()
	for _, on := range []string{"UPDATE", "commit", "clock_timestamp()"} {
		t.Run(on, func(t *testing.T) {
			t.Parallel()
			b, far, proxy := cutOff(t)
			store := far.store(t, expirypgx.Config{Emit: announceAll(far)})
			sw, err := expiry.NewSweeper(store, expiry.SweeperConfig{Logger: slog.New(slog.DiscardHandler)})
			if err != nil {
				t.Fatal(err)
			}
			stop := background(t, sw.Run)
			eventually(t, func() error { return sw.Ready(t.Context()) })
			listening(t, b)
			proxy.SilenceOn(testenv.Silence{On: on, Connections: 100})
			b.Put(t, "row", "held", 0)
			store.Wake(time.Time{})
			eventually(t, func() error {
				if proxy.Silenced() == 0 {
					return fmt.Errorf("no connection is silent yet")
				}
				return nil
			})
			start := time.Now()
			stop()
			t.Logf("ended after %v", time.Since(start).Round(10*time.Millisecond))
			if took := time.Since(start); took > 10*time.Second+busy {
				t.Errorf("it took %v", took)
			}
		})
	}
}
