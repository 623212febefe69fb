package main_test

import (
	"fmt"
	"net"
	"os/user"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/uuid"
	amqp "github.com/rabbitmq/amqp091-go"
	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/internal/amqptest"
	"github.com/holdfast-go/holdfast/internal/pgtest"
	"github.com/holdfast-go/holdfast/internal/redistest"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

func TestUsage(t *testing.T) {
	t.Parallel()
	for _, args := range [][]string{
		{"-backend=memory", "-role=relay"},
		{"-role=api"},
		{"-backend=memory", "relay"},
		{"-backend=floppy"},
		{"-backend=services", "-role=boss"},
		{"-hold=x"},
		{"-hold=0s"},
		{"-hold=-1m"},
		{"-sweep=sometimes"},
		{"-sweep=@every 1ns"},
		{"-user-limit=0"},
		{"-global-limit=-1"},
		{"-port=1"},
		{"nonsense"},
		{"-user-limit=1000000001"},
		{"-global-limit=1000000001"},
		{"-user-limit=9223372036854775807"},
		{"-addr="},
		{"-addr=8080"},
		{"-addr=127.0.0.1:99999"},
		{"-backend=services", "-role=api", "-addr="},
		{"-ops-addr=9090"},
		{"-backend=services", "-role=relay", "-ops-addr=127.0.0.1:0"},
		{"relay", "x"},
		{"relay", "--limit=0"},
		{"relay", "--limit=x"},
		{"dead"},
		{"dead", "raise"},
		{"dead", "show"},
		{"dead", "retry"},
		{"dead", "remove"},
		{"dead", "list", "--id=x"},
		{"dead", "show", "x"},
		{"relay", "--time-limit=-1s"},
		{"relay", "--time-limit=99999999999"},
		{"dead", "list", "--from=x"},
		{"dead", "groups", "--from=outbox"},
		{"dead", "remove", "--from=outbox", "--group=0123456789abcdef"},
		{"sweep", "--now"},
		{"-backend=containers", "sweep"},
	} {
		code, out, errs := command(t, nil, args...)
		if code != 2 || out != "" || strings.Count(errs, "\n") != 1 || !strings.HasPrefix(errs, "reservation: ") {
			t.Errorf("%q exits with %d, prints %q and %q; want 2 and one line", args, code, out, errs)
		}
	}
	if code, out, _ := command(t, nil, "-h"); code != 0 || !strings.Contains(out, "doctor") {
		t.Errorf("-h exits with %d: %s", code, out)
	}
	for part, args := range map[string][]string{
		"-time-limit": {"relay", "-h"}, "list|groups": {"dead", "-h"}, "-class": {"dead", "retry", "--help"},
	} {
		if code, out, _ := command(t, nil, args...); code != 0 || !strings.Contains(out, part) {
			t.Errorf("%q exits with %d: %s", args, code, out)
		}
	}
}

func TestLargestLimits(t *testing.T) {
	t.Parallel()
	shop := start(t, nil, "-user-limit=1000000000", "-global-limit=1000000000")
	newClient(t, shop.url).newEvent(`{"name":"Concert","seats":1}`)
	shop.stop()
}

func TestBadAddressesDoNotShowPasswords(t *testing.T) {
	t.Parallel()
	env := []string{"DATABASE_URL=mysql://root:secret@localhost/x", "AMQP_URL=amqp://guest:secret@%zz/"}
	code, _, errs := command(t, env, "-backend=services")
	if code != 2 || strings.Contains(errs, "secret") || !strings.Contains(errs, "DATABASE_URL") || !strings.Contains(errs, "AMQP_URL") {
		t.Errorf("exit %d: %s", code, errs)
	}
}

func TestOperatorCommands(t *testing.T) {
	t.Parallel()
	s := newServices(t)
	wants := func(want int, part string, args ...string) {
		t.Helper()
		code, out, errs := command(t, s.env(), args...)
		if code != want || !strings.Contains(out, part) {
			t.Errorf("%q exits with %d, want %d; prints %q, want %q\n%s", args, code, want, out, part, errs)
		}
	}
	wants(1, "the command migrate creates", "doctor")
	if _, out, _ := command(t, s.env(), "doctor"); strings.Count(out, "\n") > 30 || !strings.Contains(out, "more\n") {
		t.Errorf("on empty servers doctor prints %d lines: %s", strings.Count(out, "\n"), out)
	}
	for want, args := range map[int][]string{2: {"relay"}, 1: {"dead", "list"}} {
		code, _, errs := command(t, s.env(), args...)
		if code != want || !strings.HasSuffix(errs, "run `reservation migrate` first\n") || strings.Count(errs, "reservation: ") != 1 {
			t.Errorf("%q before migrate exits with %d: %s", args, code, errs)
		}
	}
	wants(0, "up to date", "migrate")
	wants(0, "up to date", "migrate")
	healthy(t, s.env())
	wants(0, "published 0, failed 0", "relay")
	wants(0, "expired 0", "sweep")
	wants(0, "outbox 0, inbox 0, idempotency 0", "prune")
	wants(0, "", "dead", "list")

	api := start(t, s.env(), "-backend=services", "-role=api")
	c := newClient(t, api.url)
	event := c.newEvent(`{"name":"Concert","seats":5}`)
	for range 3 {
		c.hold(newUser(), event, `"quantity":1`)
	}
	brokerless := s
	brokerless.amqpURL = "amqp://127.0.0.1:1/"
	if code, out, _ := command(t, brokerless.env(), "relay"); code != 2 || out != "published 0, failed 0, dead 0\n" {
		t.Errorf("relay without a broker exits with %d and prints %q", code, out)
	}
	wants(0, "published 2, failed 0", "relay", "--limit", "2")
	wants(0, "published 1, failed 0", "relay", "--limit=10", "--time-limit=1s")

	c.hold(newUser(), event, `"quantity":1`)
	pool := pgtest.Pool(t, s.databaseURL, 1)
	if _, err := pool.Exec(t.Context(), "update holdfast_outbox set exchange = 'nowhere'"); err != nil {
		t.Fatal(err)
	}
	wants(1, "published 0, failed", "relay", "--limit=1000", "--time-limit=1")
	api.stop()
}

func TestDoctorSaysOnceWhatItCannotReach(t *testing.T) {
	t.Parallel()
	s := newServices(t)
	s.databaseURL = "postgres://x@127.0.0.1:1/x"
	code, _, errs := command(t, s.env(), "doctor")
	if code != 1 || strings.Count(errs, "Postgres cannot be asked") != 1 || strings.Count(errs, "\n") != 1 {
		t.Errorf("without a database doctor exits with %d: %s", code, errs)
	}
}

// TestDeadLetters sends what no consumer can read.
func TestDeadLetters(t *testing.T) { brokers(t, testDeadLetters) }

func testDeadLetters(t *testing.T, flags ...string) {
	broker := amqptest.New(t)
	s := services{pgtest.URL(t), redistest.URL(t), broker.URL}
	asConsumer := slices.Concat(flags, []string{"-backend=services", "-role=consumer"})
	consumer := start(t, s.env(), asConsumer...)
	ids := []string{uuid.Must(uuid.NewV7()).String(), uuid.Must(uuid.NewV7()).String()}
	for i, body := range []string{`{"reservation_id":7}`, `{"reservation_id":"x","event_id":"y"}`} {
		if len(flags) == 0 {
			broker.Publish(t, "reservation", "reservation.held", amqp.Publishing{
				MessageId: ids[i], Type: "reservation.held", ContentType: "application/json", Body: []byte(body),
			})
			continue
		}
		entry := &redis.XAddArgs{Stream: "reservation", Values: []string{"id", ids[i], "name", "reservation.held", "body", body}}
		if err := redistest.Client(t, s.redisURL).XAdd(t.Context(), entry).Err(); err != nil {
			t.Fatal(err)
		}
	}
	dead := func(args ...string) string {
		t.Helper()
		code, out, errs := command(t, s.env(), slices.Concat(flags, []string{"dead"}, args)...)
		if code != 0 {
			t.Fatalf("dead %q exits with %d: %s", args, code, errs)
		}
		return out
	}
	wantsLetters := func(want int) {
		t.Helper()
		testenv.Eventually(t, patience, func() error {
			if out := dead("list"); strings.Count(out, "\n") != want {
				return fmt.Errorf("dead letters are %q, want %d", out, want)
			}
			return nil
		})
	}
	wantsLetters(2)
	if out := dead("list", "--class=validation"); strings.Count(out, "\n") != 2 {
		t.Errorf("of class validation are %q, want both", out)
	}
	if out := dead("list", "--class=validation", "--limit=1"); !strings.HasPrefix(out, "inbox\t") || strings.Count(out, "\n") != 1 {
		t.Errorf("list prints %q", out)
	}
	if out := dead("show", ids[0]); !strings.Contains(out, ids[0]) || !strings.Contains(out, `{"reservation_id":7}`) ||
		!strings.Contains(out, "\ttype: *") || !strings.Contains(out, "consumer: ") {
		t.Errorf("show prints %q", out)
	}
	kinds := strings.Split(dead("groups"), "\n")
	if len(kinds) != 3 || !strings.Contains(kinds[0], "\tvalidation\treservation.held\t1\t") {
		t.Fatalf("groups prints %q", kinds)
	}
	for _, kind := range kinds[:2] {
		fingerprint, _, _ := strings.Cut(kind, "\t")
		if out := dead("list", "--group="+fingerprint); strings.Count(out, "\n") != 1 {
			t.Errorf("of kind %q are %q", fingerprint, out)
		}
		if out := dead("retry", "--group="+fingerprint, "--dry-run"); out != "would be retried: outbox 0, inbox 1\n" {
			t.Errorf("a dry run prints %q", out)
		}
	}
	if out := dead("audit"); out != "" {
		t.Errorf("after dry runs audit prints %q", out)
	}
	if out := dead("remove", ids[0], "--by=ada", "--reason=useless"); out != "removed: outbox 0, inbox 1\n" {
		t.Errorf("remove prints %q", out)
	}
	wantsLetters(1)
	if out := dead("audit"); strings.Count(out, "\n") != 1 || !strings.HasPrefix(out, "inbox\t") ||
		!strings.Contains(out, "remove\t1\tby=\"ada\"\treason=\"useless\"\tids=["+ids[0]) {
		t.Errorf("audit prints %q", out)
	}
	consumer.stop()
	fingerprint, _, _ := strings.Cut(dead("groups"), "\t")
	if out := dead("retry", "--group="+fingerprint); out != "retried: outbox 0, inbox 1\n" {
		t.Errorf("retry prints %q", out)
	}
	if out := dead("audit", "--limit=1"); !strings.Contains(out, "retry\t1\t") || !strings.Contains(out, "group="+strconv.Quote(fingerprint)) {
		t.Errorf("audit prints %q", out)
	}
	wantsLetters(0)
	start(t, s.env(), asConsumer...) // it reads no better now
	wantsLetters(1)
	if code, _, _ := command(t, s.env(), slices.Concat(flags, []string{"dead", "show", "--id=" + ids[0]})...); code != 1 {
		t.Errorf("show of a removed letter exits with %d, want 1", code)
	}
}

// TestDeadLettersOfTheOutbox has a message given up whose broker refuses it, and shows who did what with it.
func TestDeadLettersOfTheOutbox(t *testing.T) {
	t.Parallel()
	s := newServices(t)
	if code, _, errs := command(t, s.env(), "migrate"); code != 0 {
		t.Fatal(errs)
	}
	pool := pgtest.Pool(t, s.databaseURL, 2)
	ids := make([]string, 2)
	for i := range ids {
		ids[i] = uuid.Must(uuid.NewV7()).String()
		if _, err := pool.Exec(t.Context(), `
			INSERT INTO holdfast_outbox_dead (id, seq, lane, name, body, content_type, transport_name, exchange, routing_key, created_at, attempts, error_class, last_error)
			VALUES ($1, $2, 0, 'reservation.held', '{}', 'application/json', '', '', '', now(), 10, 'unroutable', 'no queue')`, ids[i], i); err != nil {
			t.Fatal(err)
		}
	}
	for _, tc := range []struct {
		want string
		args []string
	}{
		{"retried: outbox 1, inbox 0\n", []string{"retry", "--id=" + ids[0], "--by=ada", "--reason=the queue is back"}},
		{"removed: outbox 1, inbox 0\n", []string{"remove", "--all", "--from=outbox"}},
	} {
		code, out, errs := command(t, s.env(), append([]string{"dead"}, tc.args...)...)
		if code != 0 || out != tc.want {
			t.Errorf("dead %q exits with %d: %q, %s", tc.args, code, out, errs)
		}
	}
	me, err := user.Current()
	if err != nil {
		t.Fatal(err)
	}
	_, out, _ := command(t, s.env(), "dead", "audit")
	lines := strings.Split(out, "\n")
	if len(lines) != 3 || !strings.Contains(lines[0], "remove\t1\tby="+strconv.Quote(me.Username)) ||
		!strings.Contains(lines[1], `by="ada"	reason="the queue is back"	ids=[`+ids[0]) {
		t.Errorf("audit prints %q", out)
	}
	if code, out, _ := command(t, s.env(), "dead", "remove", "--all", "--by=a\nb"); code != 1 || out != "removed: outbox 0, inbox 0\n" {
		t.Errorf("a name with a line break exits with %d and prints %q", code, out)
	}
	if code, _, _ := command(t, s.env(), "dead", "remove", "--all", "--by="); code != 2 {
		t.Errorf("no name exits with %d", code)
	}
}

func TestBusyPort(t *testing.T) {
	t.Parallel()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	for _, flag := range []string{"-addr", "-ops-addr"} {
		args := []string{"-addr=127.0.0.1:0", flag + "=" + listener.Addr().String()}
		if code, _, errs := command(t, nil, args...); code != 1 || !strings.Contains(errs, flag+" chooses") || strings.Count(errs, "\n") != 1 {
			t.Errorf("%q exits with %d: %s", args, code, errs)
		}
	}
}

func TestStoppedBeforeItsServersCame(t *testing.T) {
	t.Parallel()
	nowhere := services{"postgres://x@127.0.0.1:1/x", "redis://127.0.0.1:1/0", "amqp://127.0.0.1:1/"}
	p, _ := launch(t, nowhere.env(), "-backend=services")
	testenv.Eventually(t, patience, func() error {
		if !strings.Contains(p.stderr.String(), "trying again") {
			return fmt.Errorf("it says %q", p.stderr)
		}
		return nil
	})
	p.stop()
}
