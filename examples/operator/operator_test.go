package operator_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/spf13/cobra"

	"github.com/holdfast-go/holdfast/examples/operator"
	"github.com/holdfast-go/holdfast/expiry"
	"github.com/holdfast-go/holdfast/expiry/expirytest"
	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
	"github.com/holdfast-go/holdfast/inbox/inboxtest"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/outboxtest"
	"github.com/holdfast-go/holdfast/ratelimit"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

var quiet = slog.New(slog.DiscardHandler)

// rig is a service on fakes: an outbox with the dead letters a and b, a consumer with the dead letters
// c, c and d, two overdue holds, and a limit of ten.
type rig struct {
	*operator.Operator
	cfg     operator.Config
	ids     map[string]uuid.UUID // of a, b and d
	limiter *ratelimit.Memory
	relay   *outbox.Relay
	sent    map[string]string // bodies of what was published, by name
	mended  bool
}

// published mends what fails, publishes what waits and returns the body of a message.
func (r *rig) published(t *testing.T, name string) string {
	t.Helper()
	r.mended = true
	_, err := r.relay.Drain(t.Context(), outbox.Bounds{})
	check(t, err)
	return r.sent[name]
}

func newRig(t *testing.T) *rig {
	t.Helper()
	r := &rig{ids: map[string]uuid.UUID{}, sent: map[string]string{}}
	manager := txretrytest.New(txretrytest.Config{})
	store, publisher, broker := outboxtest.New(), outboxtest.NewPublisher(), inboxtest.NewBroker()
	publisher.Respond(func(m driver.Message) error {
		if r.mended {
			r.sent[m.Name] = string(m.Body)
			return nil
		}
		return &driver.PublishError{Class: driver.Permanent, Err: fmt.Errorf("no exchange %s", m.Name)}
	})
	relay := must(outbox.NewRelay(store, publisher, outbox.RelayConfig{Retry: outbox.RetryPolicy{MaxAttempts: 1}, Logger: quiet}))(t)
	r.relay = relay
	write := func(name string) {
		t.Helper()
		m := must(outbox.NewMessage(name, map[string]string{"secret": name}))(t)
		m.Key, m.Headers = "key "+name, map[string]string{"tenant": "x"}
		if name == "b" {
			m.ContentType, m.Body = "text/plain", []byte("clears the screen:\x1b[2J")
		}
		r.ids[name] = m.ID
		check(t, manager.Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error { return store.Write(ctx, tx, m) }))
	}
	write("a")
	write("b")
	_, err := relay.Drain(t.Context(), outbox.Bounds{})
	check(t, err)

	mux := inbox.NewMux()
	mux.Fallback(func(_ context.Context, m *inbox.Message) error {
		if r.mended {
			return nil
		}
		return inbox.Unrecoverable(errors.New("no handler for " + m.Name))
	})
	consumer := must(inboxtest.NewConsumer(broker, "billing", mux, inboxtest.Config{ConsumerConfig: inbox.ConsumerConfig{Logger: quiet}}))(t)
	for _, name := range []string{"c", "c", "d"} {
		id := must(uuid.NewV7())(t)
		r.ids[name] = id
		check(t, broker.Send(t.Context(), &inbox.Message{ID: id, Name: name, Body: []byte("{}")}))
	}
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- consumer.Run(ctx) }()
	check(t, broker.Idle(t.Context()))
	stop()
	check(t, <-ended)

	holds := must(expirytest.New(manager, expirytest.Config{}))(t)
	check(t, manager.Do(t.Context(), func(_ context.Context, tx pgx.Tx) error {
		for i := range 2 {
			if err := holds.Put(tx, fmt.Sprint(i), time.Now().Add(-time.Minute), "held"); err != nil {
				return err
			}
		}
		return nil
	}))
	r.limiter = must(ratelimit.NewMemory(ratelimit.MemoryConfig{}))(t)
	r.cfg = operator.Config{
		Outboxes:  []operator.Outbox{{Store: store, Relay: relay}},
		Consumers: []operator.Consumer{{Name: "billing", Consumer: consumer, Inbox: must(inboxtest.New(manager, "billing", inboxpgx.Config{}))(t)}},
		Sweeps:    []operator.Sweep{{Name: "holds", Store: holds, Sweeper: must(expiry.NewSweeper(holds, expiry.SweeperConfig{Logger: quiet}))(t)}},
		Limiters:  []operator.Limiter{{Name: "requests", Limiter: r.limiter, Limits: []ratelimit.Limit{{Name: "user", Max: 10}}}},
		Log:       &operator.MemoryLog{},
	}
	r.Operator = must(operator.New(r.cfg))(t)
	return r
}

func must[T any](v T, err error) func(*testing.T) T {
	return func(t *testing.T) T {
		t.Helper()
		check(t, err)
		return v
	}
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func (r *rig) run(t *testing.T, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	var out, errs bytes.Buffer
	code = r.Run(t.Context(), args, &out, &errs)
	return code, out.String(), errs.String()
}

// wants runs a command that must end with the code and print all parts.
func (r *rig) wants(t *testing.T, want int, args []string, parts ...string) (stdout string) {
	t.Helper()
	code, out, errs := r.run(t, args...)
	if code != want {
		t.Errorf("%q exits with %d, want %d: %s%s", args, code, want, out, errs)
	}
	for _, part := range parts {
		if !strings.Contains(out, part) {
			t.Errorf("%q prints %q, which lacks %q", args, out, part)
		}
	}
	return out
}

func TestStatus(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.wants(t, 0, []string{"status"}, "OUTBOX", "billing", "unrecoverable 3", "holds", "2")
	var s struct {
		Outboxes []struct {
			Name string
			Dead int
		}
		Consumers []struct{ Dead map[string]int }
		Sweeps    []struct{ Overdue int }
	}
	check(t, json.Unmarshal([]byte(r.wants(t, 0, []string{"status", "--json"})), &s))
	if s.Outboxes[0].Name != "outbox" || s.Outboxes[0].Dead != 2 || s.Consumers[0].Dead["unrecoverable"] != 3 || s.Sweeps[0].Overdue != 2 {
		t.Errorf("%+v", s)
	}
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	screens, errs := 0, bytes.Buffer{}
	out := writerFunc(func(screen []byte) {
		if screens += bytes.Count(screen, []byte("OUTBOX")); screens == 2 {
			stop() // as an interrupt does
		}
	})
	if code := r.Run(ctx, []string{"status", "--watch=10ms"}, out, &errs); code != 0 || screens < 2 || errs.Len() > 0 {
		t.Errorf("--watch exits with %d after %d screens: %q", code, screens, errs.String())
	}
}

// writerFunc sees what is written.
type writerFunc func([]byte)

func (f writerFunc) Write(p []byte) (int, error) {
	f(p)
	return len(p), nil
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

func TestRelayAndSweep(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.wants(t, 0, []string{"retry", "--from=outbox", "--all"})
	r.wants(t, 1, []string{"relay", "--limit=1000", "--time-limit=0"}, "published 0")
	r.mended = true
	r.wants(t, 0, []string{"retry", "--from=outbox", "--all"})
	began := time.Now()
	r.wants(t, 0, []string{"relay", "--limit=1000", "--time-limit=1", "--json"}, `"published": 2`)
	if took := time.Since(began); took < 500*time.Millisecond {
		t.Errorf("a time limit of 1 is over after %v", took)
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

func TestMistakesInTheCommandLine(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	for _, args := range [][]string{
		{"nonsense"}, {"status", "x"}, {"status", "--watch=x"}, {"--nonsense"},
		{"outbox"}, {"outbox", "raise"}, {"outbox", "pending", "--limit=0"}, {"outbox", "dead", "--limit=-1"}, {"inbox", "dead", "--since=yesterday"}, {"inbox", "dead", "--from=x"},
		{"groups", "--limit=x"}, {"show"}, {"show", "x"}, {"show", uuid.NewString(), uuid.NewString()},
		{"retry"}, {"drop"}, {"retry", "x"}, {"drop", "--class=unrecoverable", "--key="}, {"drop", "--all", "--from="}, {"outbox", "parked", "--name="}, {"outbox", "dead", "--from=billing"}, {"sweep", "--dry-run", "--from=x"}, {"retry", "--all", "--by="}, {"retry", "--all", "--by=a\nb"}, {"retry", "--all", "--rate=-1"},
		{"retry", "--all", "--rate=NaN"}, {"drop", "--all", "--reason=" + strings.Repeat("x", 1001)},
		{"log", "--limit=0"}, {"limits"}, {"limits", "show"}, {"limits", "show", "ada", "--limit=x"},
		{"relay", "--limit=0"}, {"relay", "--limit=x"}, {"relay", "--time-limit=-1s"}, {"relay", "--time-limit=99999999999"}, {"relay", "--from=x"}, {"relay", "--from="},
		{"limits", "reset", "ada", "--limit="}, {"page", "--addr="}, {"idempotency", "show", "k", "--scope="},
		{"expiry"}, {"expiry", "stuck", "--limit=0"}, {"expiry", "stuck", "--after=-1s"}, {"sweep", "--from=x"}, {"sweep", "--from="}, {"sweep", "--now"}, {"prune", "x"}, {"setup", "x"}, {"doctor", "x"},
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
	r.wants(t, 0, []string{"__complete", "retry", "--from", ""}, "billing")
}

// A part whose server is down neither hides the others nor what is wrong.
func TestPartsThatCannotBeAsked(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.cfg.Consumers = append(r.cfg.Consumers, operator.Consumer{Name: "gone", Consumer: gone{}})
	r.cfg.Servers = []operator.Server{{Name: "RabbitMQ", Ping: func(context.Context) error { return errGone }}}
	r.Operator = must(operator.New(r.cfg))(t)
	for _, args := range [][]string{{"status"}, {"inbox", "dead"}, {"groups"}} {
		code, out, errs := r.run(t, args...)
		if code != 1 || !strings.Contains(out, "billing") || !strings.Contains(errs, "gone: nobody is there") || strings.Count(errs, "\n") != 1 {
			t.Errorf("%q exits with %d: %q %q", args, code, out, errs)
		}
	}
	if code, out, _ := r.run(t, "doctor", "--json"); code != 1 || out != "[]\n" {
		t.Errorf("doctor --json exits with %d: %q", code, out)
	}
	code, out, errs := r.run(t, "doctor")
	if code != 1 || out != "" || errs != "holdfast: RabbitMQ cannot be asked: nobody is there\n" {
		t.Errorf("doctor exits with %d: %q %q", code, out, errs)
	}
}

var errGone = errors.New("nobody is there")

// gone is a consumer whose broker is down.
type gone struct{}

func (gone) DeadLetters() inbox.DeadLetters             { return noLetters{} }
func (gone) Stats(context.Context) (inbox.Stats, error) { return inbox.Stats{}, errGone }

type noLetters struct{ inbox.DeadLetters }

func (noLetters) List(context.Context, inbox.Filter) ([]inbox.DeadLetter, error) { return nil, errGone }
func (noLetters) Groups(context.Context, inbox.Filter) ([]inbox.Group, error)    { return nil, errGone }

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
