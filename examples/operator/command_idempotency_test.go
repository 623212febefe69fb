package operator_test

import (
	"strings"
	"testing"

	"github.com/holdfast-go/holdfast/examples/operator"
	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/idempotency/idempotencytest"
)

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
