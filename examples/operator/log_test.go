package operator_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/holdfast-go/holdfast/examples/operator"
	"github.com/holdfast-go/holdfast/inbox"
)

// unwritable is a log that cannot be written.
type unwritable struct{ operator.MemoryLog }

func (*unwritable) Begin(context.Context, operator.Action) (int64, error) {
	return 0, errors.New("the disk is full")
}

func TestWhatCannotBeNotedIsNotDone(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.cfg.Log = &unwritable{}
	r.Operator = must(operator.New(r.cfg))(t)
	code, _, errs := r.run(t, "drop", "--all", "--by=ada")
	if code != 1 || !strings.Contains(errs, "the disk is full") {
		t.Errorf("exits with %d: %s", code, errs)
	}
	if left := r.groups(t); len(left) != 4 {
		t.Errorf("left are %+v", left)
	}
}

func TestMemoryLogIsBounded(t *testing.T) {
	t.Parallel()
	var log operator.MemoryLog
	first := must(log.Begin(t.Context(), operator.Action{What: "first"}))(t)
	for i := range 1000 {
		n := must(log.Begin(t.Context(), operator.Action{What: fmt.Sprint(i)}))(t)
		check(t, log.End(t.Context(), n, i, ""))
	}
	check(t, log.End(t.Context(), first, 1, "")) // long forgotten
	all := must(log.List(t.Context(), 2000))(t)
	if len(all) != 1000 || all[0].What != "999" || *all[0].Count != 999 || slices.ContainsFunc(all, func(a operator.Action) bool { return a.What == "first" }) {
		t.Errorf("%d actions, the newest %+v", len(all), all[0])
	}
}

// What a server says of a failure may hold what Postgres keeps in no text.
func TestFailureIsKept(t *testing.T) {
	t.Parallel()
	d := newDatabase(t)
	r := newRig(t)
	log := must(operator.NewPostgresLog(d.owner))(t)
	r.cfg.Log, r.cfg.Consumers = log, []operator.Consumer{{Name: "odd", Consumer: odd{}}}
	r.Operator = must(operator.New(r.cfg))(t)
	r.wants(t, 1, []string{"drop", "--all", "--from=odd", "--by=ada"})
	r.wants(t, 0, []string{"log"}, "refused:  \ufffd!", "ada")
}

// odd is a consumer whose broker answers oddly.
type odd struct{}

func (odd) DeadLetters() inbox.DeadLetters { return oddLetters{} }

type oddLetters struct{ inbox.DeadLetters }

func (oddLetters) Remove(context.Context, inbox.Filter, inbox.Removal) (int, error) {
	return 0, errors.New("refused: \x00\xff!")
}
