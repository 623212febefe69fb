package idempotencyredis_test

import (
	"context"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/idempotency/idempotencyredis"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func newStore(t *testing.T, client redis.UniversalClient, cfg idempotencyredis.Config) *idempotencyredis.Store {
	t.Helper()
	store, err := idempotencyredis.New(client, cfg)
	must(t, err)
	return store
}

const key = driver.Key("a0eebc999c0b4ef8bb6d6bb9bd380a11")

var fp = driver.FingerprintOf("request")

func begin(t *testing.T, s *idempotencyredis.Store, c driver.Claim) driver.BeginResult {
	t.Helper()
	out, err := s.Begin(t.Context(), c)
	must(t, err)
	return out
}

func hash(t *testing.T, client *redis.Client, name string) map[string]string {
	t.Helper()
	fields, err := client.HGetAll(t.Context(), name).Result()
	must(t, err)
	return fields
}

// ends checks a TTL that was set a moment ago. A busy machine may have used some of it.
func ends(t *testing.T, client *redis.Client, name string, want time.Duration) {
	t.Helper()
	if ttl, err := client.PTTL(t.Context(), name).Result(); err != nil || ttl > want || ttl < want-15*time.Second {
		t.Errorf("TTL of %s is %v, %v; want %v", name, ttl, err, want)
	}
}

// trips counts the commands sent to the server.
type trips struct{ n atomic.Int64 }

func (*trips) DialHook(next redis.DialHook) redis.DialHook { return next }
func (h *trips) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		h.n.Add(1)
		return next(ctx, cmd)
	}
}

func (*trips) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

type finding interface {
	error
	Fix() string
}

// findingsOf returns the findings joined by Check.
func findingsOf(err error) (all []finding) {
	joined, ok := err.(interface{ Unwrap() []error })
	if !ok {
		return nil
	}
	for _, err := range joined.Unwrap() {
		if f, ok := err.(finding); ok {
			all = append(all, f)
		}
	}
	return all
}
