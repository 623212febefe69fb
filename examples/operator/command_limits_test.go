package operator_test

import (
	"encoding/json"
	"testing"

	"github.com/holdfast-go/holdfast/ratelimit"
)

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
