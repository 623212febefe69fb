// Package redistest gives a test a logical database of its own on the shared Redis.
package redistest

import (
	"cmp"
	"context"
	"fmt"
	"net/url"
	"strconv"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/internal/testenv"
)

const (
	counterKey  = "holdfast:test:counter"
	claimKey    = "holdfast:test:claim:%d"
	claimTTL    = time.Hour // outlives any test run; frees what a killed one has claimed
	maxDatabase = 16        // Redis's default, where the server does not tell
)

// New returns a client of an empty database that no other test uses. It is
// emptied and the client closed when the test ends.
func New(t testing.TB) *redis.Client {
	t.Helper()
	return Client(t, URL(t))
}

// URL returns the address of an empty database that no other test uses.
func URL(t testing.TB) string {
	t.Helper()
	base := testenv.RedisURL(t)
	admin := patient(t, base)
	db, err := claim(t.Context(), admin)
	if err != nil {
		t.Fatalf("redistest: claim a database: %v", err)
	}
	u, err := url.Parse(base)
	if err != nil {
		t.Fatal(err)
	}
	u.Path = "/" + strconv.Itoa(db)
	own := patient(t, u.String())
	flush(t, own)
	t.Cleanup(func() {
		flush(t, own)
		if err := admin.Del(context.WithoutCancel(t.Context()), fmt.Sprintf(claimKey, db)).Err(); err != nil {
			t.Errorf("redistest: give database %d back: %v", db, err)
		}
	})
	return u.String()
}

// Client returns a client for any address, closed when the test ends.
func Client(t testing.TB, rawURL string) *redis.Client {
	t.Helper()
	return newClient(t, rawURL, 0)
}

// patient returns a client for what no test is about: a busy machine may take longer than the client's usual 3 s.
func patient(t testing.TB, rawURL string) *redis.Client {
	t.Helper()
	return newClient(t, rawURL, time.Minute)
}

func newClient(t testing.TB, rawURL string, readTimeout time.Duration) *redis.Client {
	t.Helper()
	opts, err := redis.ParseURL(rawURL)
	if err != nil {
		t.Fatal(err)
	}
	opts.ReadTimeout = cmp.Or(readTimeout, opts.ReadTimeout)
	client := redis.NewClient(opts)
	t.Cleanup(func() {
		if err := client.Close(); err != nil {
			t.Errorf("redistest: %v", err)
		}
	})
	return client
}

// claim walks over the databases 1, 2, … until it finds one nobody holds.
func claim(ctx context.Context, admin *redis.Client) (int, error) {
	databases := int64(maxDatabase)
	if config, err := admin.ConfigGet(ctx, "databases").Result(); err == nil {
		if n, err := strconv.ParseInt(config["databases"], 10, 64); err == nil {
			databases = n
		}
	}
	if databases < 2 {
		return 0, fmt.Errorf("the server has %d databases, tests need 2", databases)
	}
	for {
		n, err := admin.Incr(ctx, counterKey).Result()
		if err != nil {
			return 0, err
		}
		db := 1 + n%(databases-1)
		free, err := admin.SetNX(ctx, fmt.Sprintf(claimKey, db), "claimed", claimTTL).Result()
		if err != nil {
			return 0, err
		}
		if free {
			return int(db), nil
		}
		if n%(databases-1) == 0 { // all seen: wait for one to come back
			select {
			case <-ctx.Done():
				return 0, ctx.Err()
			case <-time.After(50 * time.Millisecond):
			}
		}
	}
}

func flush(t testing.TB, client *redis.Client) {
	t.Helper()
	if err := client.FlushDB(context.WithoutCancel(t.Context())).Err(); err != nil {
		t.Fatalf("redistest: %v", err)
	}
}
