package operator_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/holdfast-go/holdfast/expiry"
	"github.com/holdfast-go/holdfast/expiry/expirytest"
	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
	"github.com/holdfast-go/holdfast/inbox/inboxtest"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/modules/operator"
	"github.com/holdfast-go/holdfast/modules/operator/command"
	"github.com/holdfast-go/holdfast/modules/operator/internal/core"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/outboxtest"
	"github.com/holdfast-go/holdfast/ratelimit"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
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

// A mistyped command is answered with a similar one, on one line.
func TestSuggestions(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	for typed, want := range map[string]string{
		"statsu": "did you mean status?\n", "inbox daed": "did you mean dead?\n", "zzzzzz": "unexpected argument \"zzzzzz\"\n",
	} {
		if code, _, errs := r.run(t, strings.Fields(typed)...); code != 2 || !strings.HasSuffix(errs, want) || strings.Count(errs, "\n") != 1 {
			t.Errorf("%s exits with %d: %q, want %q", typed, code, errs, want)
		}
	}
}

// Below the root of another program, that program prints the errors.
func TestCommandOfAnotherProgram(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	root := &cobra.Command{Use: "shop"}
	root.AddCommand(must(command.New(r.cfg))(t))
	var out, errs bytes.Buffer
	code := command.Execute(t.Context(), root, []string{"holdfast", "limits", "show"}, &out, &errs)
	if code != 2 || out.Len() > 0 || errs.String() != "shop: shop holdfast limits show: needs one key\n" {
		t.Errorf("exits with %d: %q %q", code, out.String(), errs.String())
	}
	out.Reset()
	errs.Reset()
	r.cfg.Consumers = []operator.Consumer{{Name: "new", Consumer: unmigrated{}}}
	root = &cobra.Command{Use: "shop"}
	root.AddCommand(must(command.New(r.cfg))(t))
	code = command.Execute(t.Context(), root, []string{"holdfast", "groups", "--from=new"}, &out, &errs)
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
	_, err := command.New(operator.Config{
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

// completed returns the completions by the words typed before. An argument or flag that is not here has none.
func completed() map[string]string {
	const (
		names, classes = "a\nb\nc\nd\n", "permanent\nunrecoverable\n"
		jobs           = "consume\nidempotency\noperate\nrelay\nsweep\nwrite\n"
	)
	want := map[string]string{
		"pause": "billing\noutbox\n", "resume": "billing\noutbox\n",
		"limits show": "ada\n", "limits reset": "ada\n", "limits show --limit": "all\nuser\n", "limits reset --limit": "all\nuser\n",
		"relay --from": "outbox\n", "sweep --from": "holds\n",
		"outbox pending --from": "outbox\n", "outbox pending --name": "ready\n", "outbox pending --key": "key ready\n",
		"outbox parked --from": "outbox\n", "outbox parked --name": "parked\n", "outbox parked --key": "key parked\n",
		"schema grants --job": jobs, "schema print --format": "atlas\ngolang-migrate\ngoose\nsql\n",
		"outbox dead --from": "outbox\n", "outbox dead --name": "a\nb\n", "outbox dead --key": "key a\nkey b\n", "outbox dead --class": "permanent\n",
		"inbox dead --from": "billing\n", "inbox dead --name": "c\nd\n", "inbox dead --class": "unrecoverable\n",
	}
	for _, cmd := range []string{"groups", "retry", "drop"} {
		want[cmd+" --from"], want[cmd+" --name"], want[cmd+" --class"], want[cmd+" --key"] = "billing\ninbox\noutbox\n", names, classes, "key a\nkey b\n"
	}
	want["show --from"] = want["retry --from"]
	want["postpone --from"], want["postpone --name"], want["postpone --key"] = want["retry --from"], "parked\n", "key parked\n"
	want["inbox retrying --from"] = "billing\n"
	return want
}

func TestEveryCommandCompletes(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.cfg.Limiters[0].Keys = []string{"", "ada"}
	r.cfg.Limiters = append(r.cfg.Limiters, operator.Limiter{Name: "more", Limiter: r.limiter, Limits: []ratelimit.Limit{{Name: "all", Max: 1}}})
	r.write("ready", time.Time{})
	r.write("parked", time.Now().Add(time.Hour))
	want := completed()
	asked := map[string]bool{}
	ask := func(path string) {
		t.Helper()
		asked[path] = true
		out := r.wants(t, 0, append([]string{"__complete"}, append(strings.Fields(path), "")...))
		switch path {
		case "show", "retry", "drop":
			if !strings.Contains(out, r.ids["a"].String()+"\ta: outbox: publish: permanent: no exchange a\n") || !strings.HasSuffix(out, "\n:4\n") {
				t.Errorf("%s: completes %q", path, out)
			}
		case "postpone":
			wantCompleted(t, path, out, r.ids["parked"].String()+"\tparked:\n:4\n")
		case "outbox dead --group", "groups --group", "retry --group", "drop --group":
			if !strings.Contains(out, "\toutbox: publish: permanent: no exchange a\n") || strings.Contains(out, "no handler for c") == (path == "outbox dead --group") {
				t.Errorf("%s: completes %q", path, out)
			}
		case "inbox dead --group":
			if !strings.Contains(out, "\tno handler for c") || strings.Contains(out, "no exchange") {
				t.Errorf("%s: completes %q", path, out)
			}
		case "retry --body":
			wantCompleted(t, path, out, ":0\n") // any file
		case "schema print --dir":
			wantCompleted(t, path, out, ":16\n") // folders
		default:
			wantCompleted(t, path, out, want[path]+":4\n")
		}
	}
	eachCommand(must(command.New(r.cfg))(t), func(path string, cmd *cobra.Command) {
		ask(path)
		cmd.LocalFlags().VisitAll(func(flag *pflag.Flag) {
			if flag.NoOptDefVal == "" {
				ask(path + " --" + flag.Name)
			}
		})
	})
	for path := range want {
		if !asked[path] {
			t.Errorf("there is no %s", path)
		}
	}
	for typed, want := range map[string]string{
		"pause outbox|": "billing\n", "pause bi": "billing\n", "show 1|": "", "limits show ada|": "", "retry --from outbox,": "outbox,billing\noutbox,inbox\n",
		"schema grants --job relay,w": "relay,write\n", "drop --class un": "unrecoverable\n", "groups --from=outbox --name|": "a\nb\n",
	} {
		args := append([]string{"__complete"}, strings.Fields(strings.TrimSuffix(typed, "|"))...)
		if strings.HasSuffix(typed, "|") {
			args = append(args, "")
		}
		wantCompleted(t, typed, r.wants(t, 0, args), want+":4\n")
	}
}

// together has dead letters that must be listed together with another consumer's, a few at a time, and never counted.
type together struct {
	inbox.DeadLetters
	t      *testing.T
	listed *sync.WaitGroup
}

func (l together) List(ctx context.Context, f inbox.Filter) ([]inbox.DeadLetter, error) {
	if f.Limit < 1 || f.Limit > 100 {
		l.t.Errorf("%d dead letters are listed", f.Limit)
	}
	l.listed.Done()
	both := make(chan struct{})
	go func() {
		l.listed.Wait()
		close(both)
	}()
	select {
	case <-both:
	case <-ctx.Done():
		l.t.Error("one consumer waits for the other")
	}
	return l.DeadLetters.List(ctx, f)
}

func (l together) Groups(context.Context, inbox.Filter) ([]inbox.Group, error) {
	l.t.Error("all dead letters are read to count the kinds")
	return nil, nil
}

type togetherConsumer struct{ letters together }

func (c togetherConsumer) DeadLetters() inbox.DeadLetters { return c.letters }

// A completion leaves most dead letters of a queue to other readers, and asks all consumers at the same time.
func TestCompletion_takesFewDeadLetters(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	var listed sync.WaitGroup
	letters := togetherConsumer{together{r.cfg.Consumers[0].Consumer.DeadLetters(), t, &listed}}
	r.cfg.Consumers = []operator.Consumer{{Name: "billing", Consumer: letters}, {Name: "mail", Consumer: letters}}
	for _, typed := range []string{"show", "retry", "drop", "drop --key", "retry --group", "inbox dead --name"} {
		listed.Add(2)
		out := r.wants(t, 0, append([]string{"__complete"}, append(strings.Fields(typed), "")...))
		if typed == "inbox dead --name" && out != "c\nd\n:4\n" {
			t.Errorf("%s completes %q", typed, out)
		}
	}
}

func wantCompleted(t *testing.T, typed, got, want string) {
	t.Helper()
	if got != want {
		t.Errorf("%s completes %q, want %q", typed, got, want)
	}
}

// eachCommand visits the commands without subcommands. path is the command line that calls one.
func eachCommand(root *cobra.Command, visit func(path string, cmd *cobra.Command)) {
	for _, child := range root.Commands() {
		if child.HasSubCommands() {
			eachCommand(child, visit)
			continue
		}
		_, path, _ := strings.Cut(child.CommandPath(), " ")
		visit(path, child)
	}
}

var commandInText = regexp.MustCompile("`holdfast ([^`]+)`")

// The commands in the runbooks exist.
func TestRunbookCommands(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("observability/runbooks.md")
	if err != nil {
		t.Fatal(err)
	}
	commands := 0
	for _, found := range commandInText.FindAllStringSubmatch(string(text), -1) {
		commands++
		args := strings.Fields(found[1])
		cmd, rest, err := must(command.New(operator.Config{}))(t).Find(args)
		if err == nil {
			err = cmd.ParseFlags(rest)
		}
		if err == nil {
			err = cmd.ValidateArgs(cmd.Flags().Args())
		}
		if err != nil || !cmd.Runnable() {
			t.Errorf("%s: %v", found[0], err)
		}
	}
	if commands == 0 {
		t.Error("the runbooks name no command")
	}
}

func TestMain(m *testing.M) {
	core.RatesApart, core.LiveEvery = 10*time.Millisecond, 200*time.Millisecond
	os.Exit(testenv.Run(m))
}

var quiet = slog.New(slog.DiscardHandler)

// rig is a service on fakes: an outbox with the dead letters a and b, a consumer with the dead letters
// c, c and d, two overdue holds, and a limit of ten.
type rig struct {
	cfg     operator.Config
	ids     map[string]uuid.UUID // of a, b and d
	limiter *ratelimit.Memory
	relay   *outbox.Relay
	broker  *inboxtest.Broker
	take    func(*testing.T)  // runs the consumer until the broker is idle
	sent    map[string]string // bodies of published messages, by name
	fixed   bool
	write   func(name string, notBefore time.Time) // stores a message in the outbox
}

// published lets all publishes succeed, publishes the waiting messages, and returns the body of one.
func (r *rig) published(t *testing.T, name string) string {
	t.Helper()
	r.fixed = true
	_, err := r.relay.Drain(t.Context(), outbox.Bounds{})
	check(t, err)
	return r.sent[name]
}

// serves runs the relay until the test ends, and waits until it is ready.
func (r *rig) serves(t *testing.T) {
	t.Helper()
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- r.relay.Run(ctx) }()
	t.Cleanup(func() {
		stop()
		check(t, <-ended)
	})
	testenv.Eventually(t, func() error { return r.relay.Ready(ctx) })
}

func newRig(t *testing.T) *rig {
	t.Helper()
	r := &rig{ids: map[string]uuid.UUID{}, sent: map[string]string{}}
	manager := txretrytest.New(txretrytest.Config{})
	store, publisher, broker := outboxtest.New(), outboxtest.NewPublisher(), inboxtest.NewBroker()
	publisher.Respond(func(m driver.Message) error {
		if r.fixed {
			r.sent[m.Name] = string(m.Body)
			return nil
		}
		return &driver.PublishError{Class: driver.Permanent, Err: fmt.Errorf("no exchange %s", m.Name)}
	})
	relay := must(outbox.NewRelay(store, publisher, outbox.RelayConfig{Retry: outbox.RetryPolicy{MaxAttempts: 1}, Logger: quiet}))(t)
	r.relay = relay
	r.write = func(name string, notBefore time.Time) {
		t.Helper()
		m := must(outbox.NewMessage(name, map[string]string{"secret": name}))(t)
		m.Key, m.Headers, m.NotBefore = "key "+name, map[string]string{"tenant": "x"}, notBefore
		if name == "b" {
			m.ContentType, m.Body = "text/plain", []byte("clears the screen:\x1b[2J")
		}
		r.ids[name] = m.ID
		check(t, manager.Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error { return store.Write(ctx, tx, m) }))
	}
	r.write("a", time.Time{})
	r.write("b", time.Time{})
	_, err := relay.Drain(t.Context(), outbox.Bounds{})
	check(t, err)

	mux := inbox.NewMux()
	mux.Fallback(func(_ context.Context, m *inbox.Message) error {
		if r.fixed {
			return nil
		}
		return inbox.Unrecoverable(errors.New("no handler for " + m.Name))
	})
	consumer := must(inboxtest.NewConsumer(broker, inboxtest.Queue{Name: "billing"}, mux, inbox.ConsumerConfig{Logger: quiet}))(t)
	for _, name := range []string{"c", "c", "d"} {
		id := must(uuid.NewV7())(t)
		r.ids[name] = id
		check(t, broker.Send(t.Context(), &inbox.Message{ID: id, Name: name, Body: []byte("{}")}))
	}
	r.broker, r.take = broker, func(t *testing.T) {
		t.Helper()
		ctx, stop := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { ended <- consumer.Run(ctx) }()
		check(t, broker.Idle(t.Context()))
		stop()
		check(t, <-ended)
	}
	r.take(t)

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
	code = command.Run(t.Context(), r.cfg, args, &out, &errs)
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
