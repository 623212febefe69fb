package main_test

import (
	"fmt"
	"net"
	"slices"
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

// nowhere are servers that are not there.
var nowhere = services{"postgres://x@127.0.0.1:1/x", "redis://127.0.0.1:1/0", "amqp://127.0.0.1:1/"}

// The commands of an operator work on the servers of a shop, and doctor reports a server it cannot reach once.
func TestCommands_onServers(t *testing.T) {
	t.Parallel()
	s := newServices(t)
	wants := func(want int, part string, args ...string) {
		t.Helper()
		code, out, errs := command(t, s.env(), args...)
		if code != want || !strings.Contains(out, part) {
			t.Errorf("%q exits with %d, want %d; prints %q, want %q\n%s", args, code, want, out, part, errs)
		}
	}
	wants(1, "the command setup creates", "doctor")
	if _, out, _ := command(t, s.env(), "doctor"); strings.Count(out, "\n") > 40 || !strings.Contains(out, "more\n") {
		t.Errorf("on empty servers doctor prints %d lines: %s", strings.Count(out, "\n"), out)
	}
	for want, args := range map[int][]string{2: {"relay"}, 1: {"outbox", "dead"}} {
		code, _, errs := command(t, s.env(), args...)
		if code != want || !strings.HasSuffix(errs, "run `reservation setup` first\n") || strings.Count(errs, "reservation: ") != 1 {
			t.Errorf("%q before setup exits with %d: %s", args, code, errs)
		}
	}
	wants(0, "shop: tables", "setup")
	wants(0, "reservation.stats: broker", "setup")
	healthy(t, s.env())
	wants(0, "published 0, failed 0", "relay")
	wants(0, "expired 0", "sweep")
	wants(0, "idempotency        0", "prune")
	wants(0, "", "outbox", "dead")
	wants(0, "reservation.stats", "status")
	wants(0, "user", "limits", "show", "ada")

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
	wants(0, "published 1, failed 0", "relay", "--limit=1", "--time-limit=5m")

	c.hold(newUser(), event, `"quantity":1`)
	pool := pgtest.Pool(t, s.databaseURL, 1)
	if _, err := pool.Exec(t.Context(), "update holdfast_outbox set exchange = 'nowhere'"); err != nil {
		t.Fatal(err)
	}
	wants(1, "published 0, failed", "relay", "--limit=1", "--time-limit=300")
	api.stop()

	nowhereDB := s
	nowhereDB.databaseURL = nowhere.databaseURL
	code, _, errs := command(t, nowhereDB.env(), "doctor")
	if code != 1 || strings.Count(errs, "Postgres cannot be asked") != 1 || strings.Count(errs, "\n") != 1 {
		t.Errorf("without a database doctor exits with %d: %s", code, errs)
	}
}

// TestCommands_deadLetters sends what no consumer can read, and has an operator look at it and drop it.
func TestCommands_deadLetters(t *testing.T) { brokers(t, testDeadLetters) }

func testDeadLetters(t *testing.T, flags ...string) {
	broker := amqptest.New(t)
	s := services{pgtest.URL(t), redistest.URL(t), broker.URL}
	asConsumer := slices.Concat(flags, []string{"-backend=services", "-role=consumer"})
	consumer := start(t, s.env(), asConsumer...)
	id := uuid.Must(uuid.NewV7()).String()
	body := `{"reservation_id":7}`
	if len(flags) == 0 {
		broker.Publish(t, "reservation", "reservation.held", amqp.Publishing{
			MessageId: id, Type: "reservation.held", ContentType: "application/json", Body: []byte(body),
		})
	} else {
		entry := &redis.XAddArgs{Stream: "reservation", Values: []string{"id", id, "name", "reservation.held", "body", body}}
		noError(t, redistest.Client(t, s.redisURL).XAdd(t.Context(), entry).Err())
	}
	operate := func(args ...string) string {
		t.Helper()
		code, out, errs := command(t, s.env(), slices.Concat(flags, args)...)
		if code != 0 {
			t.Fatalf("%q exits with %d: %s", args, code, errs)
		}
		return out
	}
	wantsStatus := func(want string) {
		t.Helper()
		testenv.Eventually(t, func() error {
			if out := operate("status"); !strings.Contains(out, want) {
				return fmt.Errorf("status prints %q, want %q", out, want)
			}
			return nil
		})
	}
	wantsStatus("validation 1")
	consumer.stop()
	if out := operate("show", id); !strings.Contains(out, body) || !strings.Contains(out, "validation") {
		t.Errorf("show prints %q", out)
	}
	if out := operate("retry", "--class=validation", "--by=ada", "--reason=mended"); out != "outbox: 0 retried\nreservation.stats: 1 retried\n" {
		t.Errorf("retry prints %q", out)
	}
	consumer = start(t, s.env(), asConsumer...) // it reads no better now
	wantsStatus("validation 1")
	consumer.stop()
	if out := operate("drop", id, "--by=ada"); out != "outbox: 0 dropped\nreservation.stats: 1 dropped\n" {
		t.Errorf("drop prints %q", out)
	}
	log := operate("log")
	if !strings.Contains(log, "mended") || strings.Count(log, "ada") != 2 || strings.Index(log, "drop") > strings.Index(log, "retry") {
		t.Errorf("log prints %s", log)
	}
}

func TestProcess_busyPort(t *testing.T) {
	t.Parallel()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	noError(t, err)
	defer listener.Close()
	for _, flag := range []string{"-addr", "-ops-addr"} {
		args := []string{"-addr=127.0.0.1:0", flag + "=" + listener.Addr().String()}
		if code, _, errs := command(t, nil, args...); code != 1 || !strings.Contains(errs, flag+" chooses") || strings.Count(errs, "\n") != 1 {
			t.Errorf("%q exits with %d: %s", args, code, errs)
		}
	}
}

func TestProcess_stopsBeforeItsServersCome(t *testing.T) {
	t.Parallel()
	p, _ := launch(t, nowhere.env(), "-backend=services")
	testenv.Eventually(t, func() error {
		if !strings.Contains(p.stderr.String(), "trying again") {
			return fmt.Errorf("it says %q", p.stderr)
		}
		return nil
	})
	p.stop()
}
