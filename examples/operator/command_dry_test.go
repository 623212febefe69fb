package operator_test

import (
	"context"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"github.com/holdfast-go/holdfast/examples/operator"
)

// looks are the commands that change nothing by themselves. schema print writes files, with some of its flags.
var looks = map[string]bool{
	"status": true, "outbox pending": true, "outbox parked": true, "outbox dead": true, "inbox dead": true, "groups": true, "show": true,
	"log": true, "page": true, "mcp": true, "limits show": true, "idempotency show": true, "expiry due": true, "expiry stuck": true, "schema grants": true, "doctor": true,
}

// unnoted are the commands whose changes are not an operator's: what relay publishes was decided by whoever wrote it, and
// schema print writes files.
var unnoted = map[string]bool{"relay": true, "schema print": true}

// Every command that changes something has a flag that keeps it from that, and says who does it and why; no other has.
func TestWhatChangesHasADryRun(t *testing.T) {
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
		if has == looks[path] {
			t.Errorf("%s has the flag --dry-run: %v", path, has)
		}
		if why := cmd.Flags().Lookup("reason") != nil && cmd.Flags().Lookup("by") != nil; why != (has && !unnoted[path]) {
			t.Errorf("%s has the flags --by and --reason: %v", path, why)
		}
		if has {
			changing++
		}
	}
	visit(newRig(t).Command())
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

// mute prunes, and does not tell how much that will be.
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
	r.Operator = must(operator.New(r.cfg))(t)
	for range 2 {
		r.wants(t, 0, []string{"prune", "--dry-run"}, "WOULD BE", "aged     3\n", "silent   it does not tell\n")
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
	r.mended = true
	r.wants(t, 0, []string{"retry", "--from=outbox", "--all"})
	r.wants(t, 0, []string{"relay", "--dry-run"}, "outbox: 2 ready to be published\n")
	r.wants(t, 0, []string{"relay", "--dry-run", "--json"}, `"ready": 2`)
	r.wants(t, 2, []string{"relay", "--dry-run", "--from=none"})
	r.wants(t, 0, []string{"relay"}, "published 2")
	r.wants(t, 0, []string{"relay", "--dry-run"}, "outbox: 0 ready to be published\n")
}
