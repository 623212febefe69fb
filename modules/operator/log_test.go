package operator_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/internal/silent"
	"github.com/holdfast-go/holdfast/internal/testenv/pgtest"
	"github.com/holdfast-go/holdfast/modules/operator"
	"github.com/holdfast-go/holdfast/modules/operator/agents"
	"github.com/holdfast-go/holdfast/modules/operator/page"
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
	code, _, errs := r.run(t, "drop", "--all", "--by=ada")
	if code != 1 || !strings.Contains(errs, "the disk is full") {
		t.Errorf("exits with %d: %s", code, errs)
	}
	if left := r.groups(t); len(left) != 4 {
		t.Errorf("left are %+v", left)
	}
}

// Upkeep by hand is noted with who and why and how much, and a dry run of it is not.
func TestUpkeepIsNoted(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.cfg.Parts = []operator.Part{{Name: "aged", Part: &aged{3}}}
	for _, command := range []string{"sweep", "prune", "setup"} {
		r.wants(t, 0, []string{command, "--dry-run"})
		r.wants(t, 2, []string{command, "--by="})
	}
	if out := r.wants(t, 0, []string{"log"}); out != "" {
		t.Errorf("after dry runs the log has %q", out)
	}
	for _, command := range []string{"sweep", "prune", "setup"} {
		r.wants(t, 0, []string{command, "--by=ada", "--reason=why " + command})
	}
	for _, a := range must(r.cfg.Log.List(t.Context(), operator.LogFilter{Limit: 100}))(t) {
		got := fmt.Sprint(a.What, " ", a.On, " ", a.By, " ", a.Reason, " ", *a.Count)
		if !slices.Contains([]string{"sweep holds ada why sweep 2", "prune aged ada why prune 3", "prune outbox ada why prune 0", "prune billing ada why prune 0", "setup all parts ada why setup 1"}, got) {
			t.Errorf("the log has %q", got)
		}
	}
	r.wants(t, 0, []string{"log"}, "why sweep", "why prune", "why setup")
}

// refusing is a log whose table refuses.
type refusing struct {
	operator.MemoryLog
	code string
}

func (l *refusing) Begin(context.Context, operator.Action) (int64, error) {
	return 0, &pgconn.PgError{Code: l.code}
}

// A sweep runs although its role cannot write the log, or the log does not exist yet. A log that is down stops a sweep that
// somebody asks for by name, and fails the command of one that has run by itself.
func TestUpkeepWithoutRightToLog(t *testing.T) {
	t.Parallel()
	const by = "--by=ada"
	for code, missing := range map[string]bool{"42501": true, "42P01": true, "57P01": false} {
		for _, args := range [][]string{{"sweep", by}, {"sweep"}} {
			r := newRig(t)
			r.cfg.Log = &refusing{code: code}
			want, left := 0, "0"
			if !missing {
				want = 1
			}
			if !missing && len(args) > 1 {
				left = "2"
			}
			exit, _, errs := r.run(t, args...)
			if exit != want || strings.Contains(errs, "sweep: not noted: ") != missing || !strings.Contains(errs, code) {
				t.Errorf("%s: %v exits with %d: %q", code, args, exit, errs)
			}
			r.wants(t, 0, []string{"sweep", "--dry-run"}, "holds  "+left)
			r.wants(t, want, []string{"prune", by})
			r.wants(t, 0, []string{"prune"}) // nothing
			r.wants(t, 1, []string{"drop", "--all"})
			if left := r.groups(t); len(left) != 4 {
				t.Errorf("%s: left are %+v", code, left)
			}
		}
	}
}

// What cron does is in the log where it has changed something, and does not push out what people did.
func TestUpkeepByCronIsNotedWhereItChangesSomething(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	for range 3 {
		for _, command := range []string{"sweep", "prune", "setup"} {
			r.wants(t, 0, []string{command})
		}
	}
	all := must(r.cfg.Log.List(t.Context(), operator.LogFilter{Limit: 100}))(t)
	if len(all) != 1 || all[0].What != "sweep" || *all[0].Count != 2 || all[0].By == "" {
		t.Errorf("the log has %+v", all)
	}
}

// Setup makes the table of the log before it is noted there.
func TestSetupIsNoted(t *testing.T) {
	t.Parallel()
	pool, _ := pgtest.NewSchema(t)
	log := must(operator.NewPostgresLog(pool))(t)
	r := &rig{cfg: operator.Config{Log: log}}
	r.wants(t, 0, []string{"setup", "--by=ada", "--reason=the first time"}, "log: tables")
	r.wants(t, 0, []string{"log"}, "setup", "all parts", "ada", "the first time", "log: tables")
}

// An outcome that the table drops is an error. One of an action that is no longer there is none.
func TestPostgresLog_droppedOutcome(t *testing.T) {
	t.Parallel()
	pool, _ := pgtest.NewSchema(t)
	log := must(operator.NewPostgresLog(pool))(t)
	check(t, log.Migrate(t.Context()))
	n := must(log.Begin(t.Context(), operator.Action{What: "retry"}))(t)
	must(pool.Exec(t.Context(), `CREATE FUNCTION ignore() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$;
		CREATE TRIGGER ignore BEFORE UPDATE ON holdfast_operator_log FOR EACH ROW EXECUTE FUNCTION ignore()`))(t)
	if err := log.End(t.Context(), n, 1, ""); err == nil || !strings.Contains(err.Error(), "ignored the outcome") {
		t.Errorf("End returns %v", err)
	}
	check(t, log.End(t.Context(), n+1, 1, ""))
}

// A migration whose connection falls silent keeps no other from migrating: its transaction bounds how long the server
// keeps the lock.
func TestLogMigrate_boundsItsLock(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s, sent := silent.NewPostgres(t, ""), ""
		s.Answer = func(sql string) (string, *pgproto3.ErrorResponse) {
			sent += sql + "\n"
			return "", nil
		}
		_ = must(operator.NewPostgresLog(s.Pool(t, 1)))(t).Migrate(t.Context()) // the script has no tables
		if bound, lock := strings.Index(sent, "idle_in_transaction_session_timeout"), strings.Index(sent, "pg_advisory_xact_lock"); bound < 0 || lock < bound {
			t.Errorf("it sends\n%s", sent)
		}
	})
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
	all := must(log.List(t.Context(), operator.LogFilter{Limit: 2000}))(t)
	if len(all) != 1000 || all[0].What != "999" || *all[0].Count != 999 || slices.ContainsFunc(all, func(a operator.Action) bool { return a.What == "first" }) {
		t.Errorf("%d actions, the newest %+v", len(all), all[0])
	}
}

// What people did is found behind any number of sweeps.
func TestLogWithoutUpkeep(t *testing.T) {
	t.Parallel()
	a := newAgent(t, agents.Config{})
	pool, _ := pgtest.NewSchema(t)
	kept := must(operator.NewPostgresLog(pool))(t)
	check(t, kept.Migrate(t.Context()))
	for _, log := range []operator.Log{a.cfg.Log, kept} {
		for _, what := range append([]string{"retry"}, slices.Repeat([]string{"sweep", "prune", "setup"}, 100)...) {
			must(log.Begin(t.Context(), operator.Action{What: what, On: "holds", By: "ada"}))(t)
		}
		found := must(log.List(t.Context(), operator.LogFilter{Limit: 100, WithoutUpkeep: true}))(t)
		if len(found) != 1 || found[0].What != "retry" {
			t.Errorf("%T tells %+v", log, found)
		}
	}
	if out := a.wants(t, 0, []string{"log"}); strings.Contains(out, "retry") {
		t.Errorf("the newest are %s", out)
	}
	if out := a.wants(t, 0, []string{"log", "--without-upkeep"}, "retry"); strings.Contains(out, "sweep") {
		t.Errorf("without upkeep the log is %s", out)
	}
	a.tells(t, "log", map[string]any{"without_upkeep": true}, "retry", "!sweep")
	s := serve(t, a.rig, page.Config{Authorize: everything})
	s.get(t, "log", 200, `href="log?without-upkeep=1"`)
	s.get(t, "log?without-upkeep=1", 200, "<td>retry</td>", `href="log"`)
}

// What a server says of a failure may hold what Postgres keeps in no text.
func TestFailureIsKept(t *testing.T) {
	t.Parallel()
	d := newDatabase(t)
	r := newRig(t)
	log := must(operator.NewPostgresLog(d.owner))(t)
	r.cfg.Log, r.cfg.Consumers = log, []operator.Consumer{{Name: "odd", Consumer: odd{}}}
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
