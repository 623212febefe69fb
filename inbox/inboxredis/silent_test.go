package inboxredis_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/inboxredis"
	"github.com/holdfast-go/holdfast/inbox/inboxtest/conformance"
	"github.com/holdfast-go/holdfast/internal/redistest"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// A client whose own timeout ends a call leaves no claim behind.
func TestClientWithATimeoutOfItsOwn(t *testing.T) {
	t.Parallel()
	proxy := testenv.NewProxy(t, redistest.URL(t))
	opts, err := redis.ParseURL(proxy.URL())
	if err != nil {
		t.Fatal(err)
	}
	opts.ReadTimeout, opts.MaxRetries = time.Second, -1
	client := redis.NewClient(opts)
	t.Cleanup(func() {
		proxy.Cut()
		_ = client.Close()
	})
	p := newProcessor(t, client, inboxredis.ProcessorConfig{}, func(context.Context, conformance.Event) error { return nil })
	proxy.SilenceOn(testenv.Silence{On: "processing:", Deliver: true})
	m := event()
	if err := process(t, p, m); err != nil && !errors.Is(err, driver.ErrUnavailable) {
		t.Fatal(err)
	}
	if proxy.Silenced() == 0 {
		t.Error("no connection fell silent")
	}
	testenv.Eventually(t, func() error {
		err := process(t, p, m)
		if errors.Is(err, inboxredis.ErrInProgress) {
			t.Fatal("a claim was left behind")
		}
		return err
	})
}

// A connection that falls silent in the middle of a script is given up, also by a client that would
// wait for ever, and no claim that was left behind keeps the message from being processed.
func TestSilentConnection(t *testing.T) {
	t.Parallel()
	redistest.URL(t) // skips before there are subtests
	for name, silence := range map[string]testenv.Silence{
		"claim":                {On: "processing:"},
		"claim, which arrives": {On: "processing:", Deliver: true},
		"every idle one":       {},
		"mark":                 {On: "done:"},
		"mark, which arrives":  {On: "done:", Deliver: true},
	} {
		for _, heeds := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/heeds deadlines %v", name, heeds), func(t *testing.T) {
				t.Parallel()
				proxy := testenv.NewProxy(t, redistest.URL(t))
				opts, err := redis.ParseURL(proxy.URL())
				if err != nil {
					t.Fatal(err)
				}
				opts.ContextTimeoutEnabled, opts.ReadTimeout, opts.PoolSize = heeds, -1, 50
				client := redis.NewClient(opts)
				t.Cleanup(func() {
					proxy.Cut() // ends what waits for ever
					_ = client.Close()
				})
				runs := 0
				p := newProcessor(t, client, inboxredis.ProcessorConfig{}, func(context.Context, conformance.Event) error { runs++; return nil })
				if silence == (testenv.Silence{}) {
					var held []*redis.Conn
					for range 8 {
						conn := client.Conn()
						if err := conn.Ping(t.Context()).Err(); err != nil {
							t.Fatal(err)
						}
						held = append(held, conn)
					}
					for _, conn := range held {
						_ = conn.Close() // back to the pool
					}
					proxy.SilenceConnections()
				} else {
					proxy.SilenceOn(silence)
				}
				m := event()
				began := time.Now()
				testenv.Eventually(t, func() error {
					err := process(t, p, m)
					if f := driver.Classify(err); err != nil && (f.Counted || !errors.Is(err, driver.ErrUnavailable) && !errors.Is(err, inboxredis.ErrInProgress)) {
						t.Fatalf("%v classified %+v", err, f)
					}
					return err
				})
				took := time.Since(began)
				t.Logf("%.1f s, %d connections fell silent", took.Seconds(), proxy.Silenced())
				if proxy.Silenced() == 0 {
					t.Error("no connection fell silent")
				}
				if took > 40*time.Second {
					t.Errorf("the message took %v: a claim was left behind", took)
				}
				if err := process(t, p, m); err != nil || runs != 1 {
					t.Errorf("the second delivery: %v after %d runs", err, runs)
				}
			})
		}
	}
}
