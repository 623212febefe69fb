package operator_test

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/examples/operator"
)

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
		t.Errorf("none that old: %q", out)
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
		t.Errorf("of the key b are %s", out)
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
	r.mended = true
	r.wants(t, 0, []string{"retry", "--from=outbox", "--all", "--by=ada", "--reason=the exchange is back"}, "outbox: 2 retried")
	r.wants(t, 0, []string{"relay"}, "published 2, failed 0, dead 0")
	r.wants(t, 0, []string{"drop", "--by=bob", r.ids["d"].String()}, "billing: 1 dropped")
	log := r.wants(t, 0, []string{"log"}, "the exchange is back", "ada", "bob", "--all")
	if strings.Index(log, "bob") > strings.Index(log, "ada") {
		t.Errorf("not the newest first: %s", log)
	}
	if out := r.wants(t, 0, []string{"log", "--limit=1", "--json"}); strings.Count(out, `"what"`) != 1 {
		t.Errorf("the newest one: %s", out)
	}
}

// A place that is named twice, or by its kind too, is one place; one whose name is that of a kind is
// meant before the others of the kind.
func TestFrom(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	second := newRig(t)
	r.cfg.Outboxes = append(r.cfg.Outboxes, operator.Outbox{Name: "second", Store: second.cfg.Outboxes[0].Store})
	r.Operator = must(operator.New(r.cfg))(t)
	for from, want := range map[string]string{
		"outbox": "outbox: 2 would be dropped\n", "second": "second: 2 would be dropped\n", "inbox,billing,billing": "billing: 3 would be dropped\n",
	} {
		if out := r.wants(t, 0, []string{"drop", "--all", "--dry-run", "--from=" + from}); out != want {
			t.Errorf("--from=%s: %q", from, out)
		}
	}
}
