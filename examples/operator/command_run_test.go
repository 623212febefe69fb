package operator_test

import (
	"encoding/json"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/examples/operator"
	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/idempotency/idempotencytest"
	"github.com/holdfast-go/holdfast/ratelimit"
)

func TestRelayAndSweep(t *testing.T) {
	t.Parallel()
	synctest.Test(t, testRelayAndSweep)
}

func testRelayAndSweep(t *testing.T) {
	r := newRig(t)
	r.wants(t, 0, []string{"retry", "--from=outbox", "--all"})
	r.wants(t, 1, []string{"relay", "--limit=1000", "--time-limit=0"}, "published 0")
	r.mended = true
	r.wants(t, 0, []string{"retry", "--from=outbox", "--all"})
	began := time.Now()
	r.wants(t, 0, []string{"relay", "--limit=1000", "--time-limit=5", "--json"}, `"published": 2`)
	if took := time.Since(began); took != 5*time.Second {
		t.Errorf("a time limit of 5 is over after %v", took)
	}
	r.wants(t, 0, []string{"expiry", "due"}, "holds", "2")
	r.wants(t, 1, []string{"expiry", "stuck", "--after=30"}, "holds", "SWEEP")
	r.wants(t, 1, []string{"expiry", "stuck", "--after=0s", "--limit=1", "--json"}, `"id": "0"`)
	r.wants(t, 0, []string{"expiry", "stuck", "--after=2h"})
	r.wants(t, 0, []string{"sweep", "--dry-run"}, "2")
	r.wants(t, 0, []string{"sweep"}, "expired 2, poisoned 0")
	r.wants(t, 0, []string{"sweep"}, "expired 0")
	r.wants(t, 0, []string{"doctor"}, "all is well")
	r.wants(t, 0, []string{"setup"})
	r.wants(t, 0, []string{"prune"})
}

func TestRelayMemoryLimit(t *testing.T) {
	t.Parallel()
	synctest.Test(t, testRelayMemoryLimit)
}

func testRelayMemoryLimit(t *testing.T) {
	r := newRig(t)
	r.mended = true
	began := time.Now()
	r.wants(t, 0, []string{"retry", "--from=outbox", "--all"})
	r.wants(t, 0, []string{"relay", "--time-limit=10m", "--memory-limit=1K"}, "published 2")
	if took := time.Since(began); took > time.Second {
		t.Errorf("at a limit of 1 KiB it ends after %v", took)
	}
	r.wants(t, 2, []string{"relay", "--memory-limit=much"})
	r.wants(t, 2, []string{"relay", "--memory-limit=-1"})
}

func TestLimits(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	charge := ratelimit.Charge{Limit: ratelimit.Limit{Name: "user", Max: 10}, Key: "ada"}
	for range 4 {
		_, err := r.limiter.Allow(t.Context(), charge)
		check(t, err)
	}
	remaining := func(want int) {
		t.Helper()
		var all []struct{ Remaining int }
		check(t, json.Unmarshal([]byte(r.wants(t, 0, []string{"limits", "show", "ada", "--json"})), &all))
		if len(all) != 1 || all[0].Remaining != want {
			t.Errorf("%+v, want %d left", all, want)
		}
	}
	remaining(6)
	r.wants(t, 0, []string{"limits", "reset", "ada", "--dry-run"}, "would be reset")
	remaining(6)
	r.wants(t, 0, []string{"limits", "reset", "ada", "--by=ada", "--limit=user"}, "requests: user is reset")
	remaining(10)
	r.wants(t, 0, []string{"log"}, "limits reset")
}

func TestIdempotencyShow(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.wants(t, 2, []string{"idempotency", "show", "order-1"})
	store := idempotencytest.NewStore()
	r.cfg.Parts = []operator.Part{{Name: "gate", Part: store}}
	r.Operator = must(operator.New(r.cfg))(t)
	r.wants(t, 0, []string{"idempotency", "show", "order-1"}, "gate", "free")

	key := must(idempotency.ParseOpaque("order-1"))(t).In("tenant 7")
	claim := driver.NewClaim(driver.Key(key), driver.FingerprintOf("a request"))
	_, err := store.Begin(t.Context(), claim)
	check(t, err)
	shown := []string{"idempotency", "show", "order-1", "--scope=tenant 7"}
	r.wants(t, 0, shown, "in flight", claim.Fingerprint.Sum)
	r.wants(t, 0, shown[:3], "free") // without the scope it is another key
	r.wants(t, 0, append(shown, "--json"), `"state": "in flight"`, `"since": "2`)

	check(t, store.Complete(t.Context(), claim, driver.Response{Status: 201, Body: []byte("secret\x1b[2J")}))
	for _, args := range [][]string{shown, append(shown, "--json")} {
		if out := r.wants(t, 0, args, "done", "201"); strings.Contains(out, "secret") {
			t.Errorf("the stored answer is shown unasked: %s", out)
		}
	}
	if out := r.wants(t, 0, append(shown, "--body"), "gate, body:", "secret [2J"); strings.Contains(out, "\x1b") {
		t.Errorf("a body commands the terminal: %q", out)
	}
	r.wants(t, 0, append(shown, "--body", "--json"), `"body": "secret`)
	for _, args := range [][]string{{"idempotency", "show"}, {"idempotency", "show", "a b"}, {"idempotency", "show", "a", "--scope="}} {
		if code, _, errs := r.run(t, args...); code != 2 || strings.Count(errs, "\n") != 1 {
			t.Errorf("%q exits with %d: %s", args, code, errs)
		}
	}
}
