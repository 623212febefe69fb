package idempotencypgx_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/idempotency/idempotencypgx"
	"github.com/holdfast-go/holdfast/idempotency/idempotencyredis"
	"github.com/holdfast-go/holdfast/idempotency/idempotencytest"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/redistest"
)

// Random sequences of steps by three runs of a key, with time passing between the steps, have the same results in
// memory, on Redis and on Postgres. A sequence is identified by its number.
func TestDifferentialStores(t *testing.T) {
	t.Parallel()
	const budget = time.Second // for a sequence: less than the distance of its times from any end of a lease or record
	pool, client := newPool(t), redistest.New(t)
	pass := backend(t, pool).Pass
	onPostgres := steppedStore{newStore(t, pool, idempotencypgx.Config{}), func(key driver.Key, d time.Duration) { pass(t, key, d) }}
	gate, err := idempotencyredis.New(client, idempotencyredis.Config{})
	must(t, err)
	onRedis := steppedStore{gate, ageKeys(t, client)}
	compared := 0
	for n := range testenv.Sequences(t, 200) {
		seq := newSequence(uint64(n))
		want := seq.inMemory(t)
		for name, store := range map[string]steppedStore{"Redis": onRedis, "Postgres": onPostgres} {
			start := time.Now()
			got := seq.run(store)
			if time.Since(start) > budget { // timing: skips a sequence that a busy machine delayed
				continue // the machine stalled while its clock went on
			}
			if compared++; got != want {
				t.Fatalf("sequence %d on %s:\n%s\nin memory:\n%s", n, name, got, want)
			}
		}
	}
	if t.Logf("%d sequences compared", compared); compared == 0 {
		t.Error("that proves nothing")
	}
}

// steppedStore is a store with a method that lets time pass.
type steppedStore struct {
	driver.Store
	pass func(key driver.Key, d time.Duration)
}

func ageKeys(t *testing.T, client *redis.Client) func(driver.Key, time.Duration) {
	return func(key driver.Key, d time.Duration) {
		for _, name := range []string{"idempotency:" + string(key), "idempotency:lock:" + string(key)} {
			ttl, err := client.PTTL(t.Context(), name).Result()
			if err == nil && ttl > 0 { // a TTL of zero or less deletes the key
				err = client.PExpire(t.Context(), name, ttl-d).Err()
			}
			if err != nil {
				t.Error(err)
			}
		}
	}
}

// sequence is a list of steps on one key.
type sequence struct {
	claims [3]driver.Claim
	steps  []differentialStep
}

type differentialStep struct {
	run, kind int
	pass      time.Duration
}

// newSequence chooses times whose sums stay two seconds away from the 30 s of a lease and the 48 h of a record.
func newSequence(seed uint64) *sequence {
	random, s := rand.New(rand.NewPCG(11, seed)), &sequence{}
	key := driver.Key(idempotency.NewKey())
	for i := range s.claims {
		s.claims[i] = driver.NewClaim(key, driver.FingerprintOf(fmt.Sprint("request of ", i)))
	}
	times := []time.Duration{8 * time.Second, 24 * time.Second, 40 * time.Second, 48*time.Hour + 4*time.Second}
	run := 0
	for range 4 + random.IntN(12) {
		if random.IntN(3) == 0 { // otherwise the same run continues, so that it can finish
			run = random.IntN(len(s.claims))
		}
		step := differentialStep{run: run, kind: random.IntN(6)}
		if step.kind == 5 {
			step.pass = times[random.IntN(len(times))]
		}
		s.steps = append(s.steps, step)
	}
	return s
}

func (s *sequence) inMemory(t *testing.T) (told string) {
	t.Helper()
	synctest.Test(t, func(*testing.T) {
		told = s.run(steppedStore{idempotencytest.NewStore(), func(_ driver.Key, d time.Duration) { time.Sleep(d) }})
	})
	return told
}

// run returns the results of all steps as text.
func (s *sequence) run(store steppedStore) string {
	var told strings.Builder
	for _, step := range s.steps {
		claim := s.claims[step.run]
		fmt.Fprintf(&told, "run %d: ", step.run)
		switch step.kind {
		case 0, 1:
			fmt.Fprintln(&told, "Begin:", s.begin(store, claim))
		case 2:
			fmt.Fprintln(&told, "Extend:", outcome(store.Extend(context.Background(), claim)))
		case 3:
			resp := driver.Response{Status: 200 + step.run, Body: []byte(claim.Token)}
			fmt.Fprintln(&told, "Complete:", outcome(store.Complete(context.Background(), claim, resp)))
		case 4:
			fmt.Fprintln(&told, "Release:", outcome(store.Release(context.Background(), claim)))
		case 5:
			fmt.Fprintln(&told, step.pass, "pass")
			store.pass(claim.Key, step.pass)
		}
	}
	return told.String()
}

func (s *sequence) begin(store driver.Store, claim driver.Claim) string {
	out, err := store.Begin(context.Background(), claim)
	if err != nil {
		return err.Error()
	}
	whose := -1
	for i, c := range s.claims {
		if c.Fingerprint == out.Fingerprint {
			whose = i
		}
	}
	left := (out.Lease + time.Second - 1).Truncate(time.Second)
	return fmt.Sprint(out.State, " lease ", left, " fingerprint of ", whose, " response ", out.Response.Status, " ", string(out.Response.Body))
}

func outcome(err error) string {
	if errors.Is(err, idempotency.ErrLeaseLost) {
		return "lost"
	}
	return fmt.Sprint(err)
}
