package operator_test

import (
	"context"
	"encoding/json"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/uuid"
	"github.com/spf13/cobra"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/idempotency/idempotencytest"
	"github.com/holdfast-go/holdfast/modules/operator"
	"github.com/holdfast-go/holdfast/modules/operator/command"
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
	r.fixed = true
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
	r.wants(t, 0, []string{"doctor"}, "no problems found")
	r.wants(t, 0, []string{"setup"})
	r.wants(t, 0, []string{"prune"})
}

func TestRelayMemoryLimit(t *testing.T) {
	t.Parallel()
	synctest.Test(t, testRelayMemoryLimit)
}

func testRelayMemoryLimit(t *testing.T) {
	r := newRig(t)
	r.fixed = true
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
			t.Errorf("the stored answer is shown without --body: %s", out)
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

func TestDeadLetters(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	if out := r.wants(t, 0, []string{"outbox", "dead"}, "key a", "no exchange b"); strings.Count(out, "\n") != 3 {
		t.Errorf("outbox dead prints %q", out)
	}
	if out := r.wants(t, 0, []string{"inbox", "dead", "--name=d"}, r.ids["d"].String()); strings.Count(out, "\n") != 2 {
		t.Errorf("inbox dead prints %q", out)
	}
	if out := r.wants(t, 0, []string{"inbox", "dead", "--until=1h"}); out != "" {
		t.Errorf("some are listed as that old: %q", out)
	}
	if out := r.wants(t, 0, []string{"inbox", "dead", "--since=1h", "--json", "--limit=1"}); strings.Count(out, `"id"`) != 1 {
		t.Errorf("the first one: %q", out)
	}
	r.wants(t, 0, []string{"retry", "--from=outbox", "--all", "--rate=0.01"})
	r.wants(t, 0, []string{"outbox", "pending"}, r.ids["a"].String(), "key a")
	if out := r.wants(t, 0, []string{"outbox", "parked", "--json"}, r.ids["b"].String(), "due_at"); strings.Contains(out, r.ids["a"].String()) {
		t.Errorf("parked are %s", out)
	}
	if out := r.wants(t, 0, []string{"outbox", "pending", "--key=key b"}); out != "" {
		t.Errorf("the key b has %s", out)
	}
	r = newRig(t)
	r.wants(t, 0, []string{"show", r.ids["a"].String()}, "no exchange a", "tenant=x", `"secret":"a"`)
	out := r.wants(t, 0, []string{"show", r.ids["b"].String()}, "clears the screen: [2J")
	if strings.Contains(out, "\x1b") {
		t.Errorf("show lets a message command the terminal: %q", out)
	}
	r.wants(t, 0, []string{"show", "--json", r.ids["d"].String()}, `"class": "unrecoverable"`, `"from": "billing"`)
	r.wants(t, 1, []string{"show", uuid.NewString()})
	r.wants(t, 1, []string{"show", "--from=inbox", r.ids["a"].String()})
}

type group struct {
	From, Group string
	Count       int
}

func (r *rig) groups(t *testing.T, args ...string) (all []group) {
	t.Helper()
	check(t, json.Unmarshal([]byte(r.wants(t, 0, append([]string{"groups", "--json"}, args...))), &all))
	return all
}

func TestGroups(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	all := r.groups(t)
	if len(all) != 4 || all[0].Count != 2 || all[0].From != "billing" {
		t.Fatalf("groups are %+v", all)
	}
	r.wants(t, 0, []string{"groups", "--from=outbox"}, "COUNT", "no exchange")
	r.wants(t, 0, []string{"retry", "--group=" + all[0].Group, "--dry-run"}, "billing: 2 would be retried", "outbox: 0")
	r.wants(t, 0, []string{"drop", "--group=" + all[0].Group, "--by=ada"}, "billing: 2 dropped")
	if left := r.groups(t); len(left) != 3 {
		t.Errorf("left are %+v", left)
	}
}

func TestRetryAndDropAreNoted(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.wants(t, 0, []string{"drop", "--all", "--dry-run"}, "outbox: 2 would be dropped", "billing: 3 would be dropped")
	if out := r.wants(t, 0, []string{"log"}); out != "" {
		t.Errorf("after a dry run the log has %q", out)
	}
	r.fixed = true
	r.wants(t, 0, []string{"retry", "--from=outbox", "--all", "--by=ada", "--reason=the exchange is back"}, "outbox: 2 retried")
	r.wants(t, 0, []string{"relay"}, "published 2, failed 0, dead 0")
	r.wants(t, 0, []string{"drop", "--by=bob", r.ids["d"].String()}, "billing: 1 dropped")
	for _, args := range [][]string{{"drop"}, {"retry"}, {"drop", "--dry-run"}, {"drop", "--from=billing", uuid.NewString()}} {
		args = append(args, "--by=bob", r.ids["d"].String()) // which is gone
		if code, _, errs := r.run(t, args...); code != 1 || !strings.Contains(errs, "no dead letter") {
			t.Errorf("%q exits with %d: %s", args, code, errs)
		}
	}
	log := r.wants(t, 0, []string{"log"}, "the exchange is back", "ada", "bob", "--all")
	if strings.Index(log, "bob") > strings.Index(log, "ada") {
		t.Errorf("not the newest first: %s", log)
	}
	if out := r.wants(t, 0, []string{"log", "--limit=1", "--json"}); strings.Count(out, `"what"`) != 1 {
		t.Errorf("the newest one: %s", out)
	}
}

// A place that is named twice, or also by its kind, is one place. A place's name takes precedence over a kind.
func TestFrom(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	second := newRig(t)
	r.cfg.Outboxes = append(r.cfg.Outboxes, operator.Outbox{Name: "second", Store: second.cfg.Outboxes[0].Store})
	for from, want := range map[string]string{
		"outbox": "outbox: 2 would be dropped\n", "second": "second: 2 would be dropped\n", "inbox,billing,billing": "billing: 3 would be dropped\n",
	} {
		if out := r.wants(t, 0, []string{"drop", "--all", "--dry-run", "--from=" + from}); out != want {
			t.Errorf("--from=%s: %q", from, out)
		}
	}
}

// unchanging are the commands that change nothing. schema print is not one of them: some of its flags write files.
var unchanging = map[string]bool{
	"status": true, "outbox pending": true, "outbox parked": true, "outbox dead": true, "inbox dead": true, "inbox retrying": true, "groups": true, "show": true,
	"running": true, "log": true, "page": true, "mcp": true, "limits show": true, "idempotency show": true, "expiry due": true, "expiry stuck": true, "schema grants": true, "doctor": true,
}

// unnoted are the commands whose changes are not logged: relay publishes messages that others have written, and
// schema print writes files.
var unnoted = map[string]bool{"relay": true, "schema print": true}

// Every command that changes something has --dry-run, --by and --reason. No other command has them.
func TestCommands_changesHaveDryRun(t *testing.T) {
	t.Parallel()
	changing := 0
	var visit func(cmd *cobra.Command)
	visit = func(cmd *cobra.Command) {
		for _, child := range cmd.Commands() {
			visit(child)
		}
		if cmd.HasSubCommands() {
			return
		}
		path := strings.TrimPrefix(cmd.CommandPath(), "holdfast ")
		has := cmd.Flags().Lookup("dry-run") != nil
		if has == unchanging[path] {
			t.Errorf("%s has the flag --dry-run: %v", path, has)
		}
		if why := cmd.Flags().Lookup("reason") != nil && cmd.Flags().Lookup("by") != nil; why != (has && !unnoted[path]) {
			t.Errorf("%s has the flags --by and --reason: %v", path, why)
		}
		if has {
			changing++
		}
	}
	visit(must(command.New(newRig(t).cfg))(t))
	if changing == 0 {
		t.Error("no command changes anything")
	}
}

// aged has records that are too old.
type aged struct{ records int }

func (a *aged) Prunable(context.Context) (int, error) { return a.records, nil }
func (a *aged) Prune(context.Context) (int, error) {
	n := a.records
	a.records = 0
	return n, nil
}

// mute prunes, but does not count in advance.
type mute struct{ pruned bool }

func (s *mute) Prune(context.Context) (int, error) {
	s.pruned = true
	return 7, nil
}

func TestPruneDryRun(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	quiet := &mute{}
	r.cfg.Parts = []operator.Part{{Name: "aged", Part: &aged{3}}, {Name: "silent", Part: quiet}}
	for range 2 {
		r.wants(t, 0, []string{"prune", "--dry-run"}, "WOULD BE", "aged     3\n", "silent   unknown\n")
		r.wants(t, 0, []string{"prune", "--dry-run", "--json"}, `"count": 3`, `"count": null`)
	}
	if quiet.pruned {
		t.Error("a dry run prunes")
	}
	r.wants(t, 0, []string{"prune"}, "DELETED", "aged     3\n", "silent   7\n")
	r.wants(t, 0, []string{"prune", "--dry-run"}, "aged     0\n")
}

func TestRelayDryRun(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.fixed = true
	r.wants(t, 0, []string{"retry", "--from=outbox", "--all"})
	r.wants(t, 0, []string{"relay", "--dry-run"}, "outbox: 2 ready to be published\n")
	r.wants(t, 0, []string{"relay", "--dry-run", "--json"}, `"ready": 2`)
	r.wants(t, 2, []string{"relay", "--dry-run", "--from=none"})
	r.wants(t, 0, []string{"relay"}, "published 2")
	r.wants(t, 0, []string{"relay", "--dry-run"}, "outbox: 0 ready to be published\n")
}
