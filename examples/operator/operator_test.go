package operator_test

import (
	"bytes"
	"context"
	"strings"
	"testing"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/spf13/cobra"

	"github.com/holdfast-go/holdfast/examples/operator"
	"github.com/holdfast-go/holdfast/inbox"
)

func TestMistakesInTheCommandLine(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	for _, args := range [][]string{
		{"nonsense"},
		{"status", "x"},
		{"status", "--watch=x"},
		{"--nonsense"},
		{"outbox"},
		{"outbox", "raise"},
		{"outbox", "pending", "--limit=0"},
		{"outbox", "dead", "--limit=-1"},
		{"inbox", "dead", "--since=yesterday"},
		{"inbox", "dead", "--from=x"},
		{"groups", "--limit=x"},
		{"show"},
		{"show", "x"},
		{"show", uuid.NewString(), uuid.NewString()},
		{"retry"},
		{"drop"},
		{"retry", "x"},
		{"drop", "--class=unrecoverable", "--key="},
		{"drop", "--all", "--from="},
		{"outbox", "parked", "--name="},
		{"outbox", "dead", "--from=billing"},
		{"sweep", "--dry-run", "--from=x"},
		{"retry", "--all", "--by="},
		{"retry", "--all", "--by=a\nb"},
		{"retry", "--all", "--rate=-1"},
		{"retry", "--all", "--rate=NaN"},
		{"drop", "--all", "--reason=" + strings.Repeat("x", 1001)},
		{"log", "--limit=0"},
		{"limits"},
		{"limits", "show"},
		{"limits", "show", "ada", "--limit=x"},
		{"relay", "--limit=0"},
		{"relay", "--limit=x"},
		{"relay", "--time-limit=-1s"},
		{"relay", "--time-limit=99999999999"},
		{"relay", "--from=x"},
		{"relay", "--from="},
		{"limits", "reset", "ada", "--limit="},
		{"page", "--addr="},
		{"idempotency", "show", "k", "--scope="},
		{"expiry"},
		{"expiry", "stuck", "--limit=0"},
		{"expiry", "stuck", "--after=-1s"},
		{"sweep", "--from=x"},
		{"sweep", "--from="},
		{"sweep", "--now"},
		{"prune", "x"},
		{"setup", "x"},
		{"doctor", "x"},
	} {
		code, out, errs := r.run(t, args...)
		if code != 2 || out != "" || strings.Count(errs, "\n") != 1 || !strings.HasPrefix(errs, "holdfast: ") {
			t.Errorf("%q exits with %d, prints %q and %q; want 2 and one line", args, code, out, errs)
		}
	}
	if left := r.groups(t); len(left) != 4 {
		t.Errorf("left are %+v", left)
	}
	r.wants(t, 0, nil, "doctor")
	r.wants(t, 0, []string{"help", "retry"}, "--dry-run")
	for _, shell := range []string{"bash", "zsh", "fish"} {
		r.wants(t, 0, []string{"completion", shell}, "holdfast")
	}
}

// Below the root of another program, errors are that program's to print.
func TestCommandOfAnotherProgram(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	root := &cobra.Command{Use: "shop"}
	root.AddCommand(r.Command())
	var out, errs bytes.Buffer
	code := operator.Execute(t.Context(), root, []string{"holdfast", "limits", "show"}, &out, &errs)
	if code != 2 || out.Len() > 0 || errs.String() != "shop: shop holdfast limits show: say the key of one caller\n" {
		t.Errorf("exits with %d: %q %q", code, out.String(), errs.String())
	}
	out.Reset()
	errs.Reset()
	r.cfg.Consumers = []operator.Consumer{{Name: "new", Consumer: unmigrated{}}}
	root = &cobra.Command{Use: "shop"}
	root.AddCommand(must(operator.New(r.cfg))(t).Command())
	code = operator.Execute(t.Context(), root, []string{"holdfast", "groups", "--from=new"}, &out, &errs)
	if code != 1 || !strings.HasSuffix(errs.String(), "; run `shop holdfast setup` first\n") {
		t.Errorf("without tables it exits with %d: %q", code, errs.String())
	}
}

// unmigrated is a consumer without its tables.
type unmigrated struct{}

func (unmigrated) DeadLetters() inbox.DeadLetters { return noTables{} }

type noTables struct{ inbox.DeadLetters }

func (noTables) Groups(context.Context, inbox.Filter) ([]inbox.Group, error) {
	return nil, &pgconn.PgError{Code: "42P01"}
}

func TestConfig(t *testing.T) {
	t.Parallel()
	_, err := operator.New(operator.Config{
		Outboxes:  []operator.Outbox{{}, {}},
		Consumers: []operator.Consumer{{Name: "a b"}},
		Sweeps:    []operator.Sweep{{Name: "outbox"}},
		Servers:   []operator.Server{{}},
	})
	if err == nil {
		t.Fatal("no error")
	}
	for _, part := range []string{"outbox outbox is nil", `consumer "a b"`, "sweep outbox: the name is taken", "a server needs"} {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("the error lacks %q: %v", part, err)
		}
	}
}
