package idempotencyredis_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/idempotency/idempotencyredis"
	"github.com/holdfast-go/holdfast/internal/redistest"
	"github.com/holdfast-go/holdfast/internal/silent"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// A connection that falls silent in the middle of a script costs its caller 2 s and a
// second try on another one, and is no error: every script may run again.
func TestSilentInTheMiddleOfAScript(t *testing.T) {
	t.Parallel()
	silent.BothClients(t, redistest.URL, -1, func(t *testing.T, client *redis.Client, server *silent.Redis) {
		s := newStore(t, client, idempotencyredis.Config{Lease: time.Hour, Retention: time.Hour})
		for _, deliver := range []bool{false, true} {
			c := driver.NewClaim(driver.Key(idempotency.NewKey()), fp)
			step := func(what string, take func(ctx context.Context) error) {
				t.Helper()
				if err := client.Ping(t.Context()).Err(); err != nil {
					t.Fatal(err)
				}
				before := server.Silenced()
				server.SilenceOn(testenv.Silence{On: "evalsha", Deliver: deliver})
				start := time.Now()
				if err := take(t.Context()); err != nil || server.Silenced() != before+1 {
					t.Errorf("%s, delivered %v: %v, %d connections silent", what, deliver, err, server.Silenced()-before)
				}
				silent.Took(t, what, start, 2*time.Second)
			}
			begin := func(want driver.State) func(ctx context.Context) error {
				return func(ctx context.Context) error {
					out, err := s.Begin(ctx, c)
					if err == nil && out.State != want {
						err = fmt.Errorf("%+v", out)
					}
					return err
				}
			}
			step("begin", begin(driver.Acquired))
			step("extend", func(ctx context.Context) error { return s.Extend(ctx, c) })
			step("release", func(ctx context.Context) error {
				err := s.Release(ctx, c)
				if deliver && errors.Is(err, idempotency.ErrLeaseLost) {
					return nil // the first one freed it
				}
				return err
			})
			step("begin again", begin(driver.Acquired))
			step("complete", func(ctx context.Context) error { return s.Complete(ctx, c, driver.Response{Status: 201}) })
			step("replay", begin(driver.Completed))
		}
	})
}

// Calls that gather behind lanes whose connections are silent are answered on others.
func TestGatheredTripsOnSilentConnections(t *testing.T) {
	t.Parallel()
	silent.BothClients(t, redistest.URL, -1, func(t *testing.T, client *redis.Client, server *silent.Redis) {
		s := newStore(t, client, idempotencyredis.Config{})
		if _, err := s.Begin(t.Context(), driver.NewClaim(key, fp)); err != nil {
			t.Fatal(err)
		}
		server.SilenceOn(testenv.Silence{On: "evalsha", Connections: 4})
		start := time.Now()
		var wg sync.WaitGroup
		for range 200 {
			wg.Go(func() {
				out, err := s.Begin(t.Context(), driver.NewClaim(driver.Key(idempotency.NewKey()), fp))
				if err != nil || out.State != driver.Acquired {
					t.Errorf("Begin = %+v, %v", out, err)
				}
			})
		}
		if wg.Wait(); server.Silenced() != 4 {
			t.Errorf("%d connections fell silent", server.Silenced())
		}
		silent.Took(t, "the last", start, 2*time.Second)
	})
}

// All connections fall silent at once, as behind a router that forgot them: the first caller has its answer after one wait
// or two, and all of them are closed.
func TestHalfOpenConnections(t *testing.T) {
	t.Parallel()
	silent.BothClients(t, redistest.URL, 0, func(t *testing.T, client *redis.Client, server *silent.Redis) {
		s := newStore(t, client, idempotencyredis.Config{})
		silent.Fill(t, client, 40)
		server.SilenceConnections()
		start := time.Now()
		if _, err := s.Begin(t.Context(), driver.NewClaim(driver.Key(idempotency.NewKey()), fp)); err != nil {
			t.Error(err)
		}
		if took := time.Since(start); took != 2*time.Second && took != 4*time.Second { // a second try before they are closed
			t.Errorf("Begin took %v", took)
		}
		time.Sleep(5 * time.Second)
		synctest.Wait()
		if n := server.Kept(); n > 0 || server.Silenced() < 40 {
			t.Errorf("%d of %d silent connections are open", n, server.Silenced())
		}
	})
}

// Check says in time that a server does not answer, and that a client would not
// notice.
func TestCheckOfASilentServer(t *testing.T) {
	t.Parallel()
	silent.BothClients(t, redistest.URL, -1, func(t *testing.T, client *redis.Client, server *silent.Redis) {
		s := newStore(t, client, idempotencyredis.Config{})
		err := s.Check(t.Context())
		if forEver := !client.Options().ContextTimeoutEnabled; (err != nil) != forEver || len(findingsOf(err)) > 1 {
			t.Errorf("found %v", err)
		}
		server.Pause()
		start := time.Now()
		if err := s.Check(t.Context()); err == nil || len(findingsOf(err)) > 0 {
			t.Errorf("a silent server: %v", err)
		}
		silent.Took(t, "Check", start, 6*time.Second)
	})
}
