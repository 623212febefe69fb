package main_test

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/uuid"
	"github.com/nats-io/nats.go"
	amqp "github.com/rabbitmq/amqp091-go"
	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/amqptest"
	"github.com/holdfast-go/holdfast/internal/testenv/pgtest"
	"github.com/holdfast-go/holdfast/internal/testenv/redistest"
)

// nowhere are servers that do not exist.
var nowhere = services{"postgres://x@127.0.0.1:1/x", "redis://127.0.0.1:1/0", "amqp://127.0.0.1:1/", "nats://127.0.0.1:1"}

// The commands of an operator work on the servers of a shop, and doctor reports a server it cannot reach once.
func TestCommands_onServers(t *testing.T) { brokers(t, testCommands) }

func testCommands(t *testing.T, flags ...string) {
	s := newServices(t, flags...)
	run := func(s services, args ...string) (code int, out, errs string) {
		t.Helper()
		return command(t, s.env(), slices.Concat(flags, args)...)
	}
	wants := func(want int, part string, args ...string) {
		t.Helper()
		code, out, errs := run(s, args...)
		if code != want || !strings.Contains(out, part) {
			t.Errorf("%q exits with %d, want %d; prints %q, want %q\n%s", args, code, want, out, part, errs)
		}
	}
	wants(1, "the command setup creates", "doctor")
	if _, out, _ := run(s, "doctor"); strings.Count(out, "\n") > 40 || !strings.Contains(out, "more\n") {
		t.Errorf("on empty servers doctor prints %d lines: %s", strings.Count(out, "\n"), out)
	}
	for want, args := range map[int][]string{2: {"relay"}, 1: {"outbox", "dead"}} {
		code, _, errs := run(s, args...)
		if code != want || !strings.HasSuffix(errs, "run `reservation setup` first\n") || strings.Count(errs, "reservation: ") != 1 {
			t.Errorf("%q before setup exits with %d: %s", args, code, errs)
		}
	}
	wants(0, "shop: tables", "setup")
	wants(0, "reservation.stats: broker", "setup")
	healthy(t, s.env(), flags...)
	wants(0, "published 0, failed 0", "relay")
	wants(0, "expired 0", "sweep")
	wants(0, "idempotency        0", "prune")
	wants(0, "", "outbox", "dead")
	wants(0, "reservation.stats", "status")
	wants(0, "user", "limits", "show", "ada")

	api := start(t, s.env(), slices.Concat(flags, []string{"-backend=services", "-role=api"})...)
	c := newClient(t, api.url)
	event := c.newEvent(`{"name":"Concert","seats":5}`)
	for range 3 {
		c.hold(newUser(), event, `"quantity":1`)
	}
	brokerless := nowhere
	brokerless.databaseURL, brokerless.redisURL = s.databaseURL, s.redisURL
	if slices.Contains(flags, onRedis) {
		brokerless.redisURL = nowhere.redisURL
	}
	if code, out, _ := run(brokerless, "relay"); code != 2 || out != "published 0, failed 0, dead 0\n" {
		t.Errorf("relay without a broker exits with %d and prints %q", code, out)
	}
	wants(0, "published 2, failed 0", "relay", "--limit", "2")
	wants(0, "published 1, failed 0", "relay", "--limit=1", "--time-limit=5m")

	c.hold(newUser(), event, `"quantity":1`)
	pool := pgtest.Pool(t, s.databaseURL, 1)
	if _, err := pool.Exec(t.Context(), "update holdfast_outbox set exchange = 'nowhere'"); err != nil {
		t.Fatal(err)
	}
	if !slices.Contains(flags, onRedis) { // there the first message makes the stream
		wants(1, "published 0, failed", "relay", "--limit=1", "--time-limit=300")
	}
	api.stop()

	nowhereDB := s
	nowhereDB.databaseURL = nowhere.databaseURL
	code, _, errs := run(nowhereDB, "doctor")
	if code != 1 || strings.Count(errs, "Postgres is unreachable") != 1 || strings.Count(errs, "\n") != 1 {
		t.Errorf("without a database doctor exits with %d: %s", code, errs)
	}
}

// TestCommands_deadLetters sends a message that no consumer can decode. An operator shows, retries and drops it.
func TestCommands_deadLetters(t *testing.T) { brokers(t, testDeadLetters) }

func testDeadLetters(t *testing.T, flags ...string) {
	s := newServices(t, flags...)
	asConsumer := slices.Concat(flags, []string{"-backend=services", "-role=consumer"})
	consumer := start(t, s.env(), asConsumer...)
	awaitReady(t, consumer.url) // its queue exists
	id := uuid.Must(uuid.NewV7()).String()
	body := `{"reservation_id":7}`
	s.send(t, id, "reservation.held", body, flags...)
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
			code, out, errs := command(t, s.env(), slices.Concat(flags, []string{"status"})...)
			if !strings.Contains(out, want) || errs != "" { // it exits with 1 for the dead letter
				return fmt.Errorf("status exits with %d and prints %q, want %q: %s", code, out, want, errs)
			}
			return nil
		})
	}
	counted := "validation 1"
	if len(flags) == 0 {
		counted = "default 1" // RabbitMQ counts by queue, and this class has none of its own
	}
	wantsStatus(counted)
	consumer.stop()
	if out := operate("show", id); !strings.Contains(out, body) || !strings.Contains(out, "validation") {
		t.Errorf("show prints %q", out)
	}
	if out := operate("retry", "--class=validation", "--by=ada", "--reason=fixed"); out != "outbox: 0 retried\nreservation.stats: 1 retried\n" {
		t.Errorf("retry prints %q", out)
	}
	consumer = start(t, s.env(), asConsumer...) // it still cannot decode it
	wantsStatus(counted)
	consumer.stop()
	if out := operate("drop", id, "--by=ada"); out != "outbox: 0 dropped\nreservation.stats: 1 dropped\n" {
		t.Errorf("drop prints %q", out)
	}
	log := operate("log")
	if !strings.Contains(log, "fixed") || strings.Count(log, "ada") != 2 || strings.Index(log, "drop") > strings.Index(log, "retry") {
		t.Errorf("log prints %s", log)
	}
}

// send sends a message past the outbox.
func (s services) send(t *testing.T, id, name, body string, flags ...string) {
	t.Helper()
	switch {
	case slices.Contains(flags, onRedis):
		entry := &redis.XAddArgs{Stream: "reservation", Values: []string{"id", id, "name", name, "body", body}}
		noError(t, redistest.Client(t, s.redisURL).XAdd(t.Context(), entry).Err())
	case slices.Contains(flags, onNATS):
		conn, err := nats.Connect(s.natsURL)
		noError(t, err)
		defer conn.Close()
		_, err = conn.RequestMsg(&nats.Msg{
			Subject: "reservation." + name, Data: []byte(body), Header: nats.Header{nats.MsgIdHdr: {id}, "holdfast-name": {name}},
		}, testenv.Patience)
		noError(t, err)
	default:
		broker := amqptest.Broker{URL: s.amqpURL}
		broker.Publish(t, "reservation", name, amqp.Publishing{
			MessageId: id, Type: name, ContentType: "application/json", Body: []byte(body),
		})
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
			return fmt.Errorf("it prints %q", p.stderr)
		}
		return nil
	})
	p.stop()
}

func TestOps_address(t *testing.T) {
	t.Parallel()
	shop := start(t, nil, "-ops-addr=127.0.0.1:0")
	var ops string
	testenv.Eventually(t, func() error {
		if _, after, ok := strings.Cut(shop.stdout.String(), "operators see "); ok {
			ops, _, _ = strings.Cut(after, "\n")
		}
		if ops == "" {
			return fmt.Errorf("it prints %q", shop.stdout)
		}
		return nil
	})
	customer, operator := newClient(t, shop.url), newClient(t, ops)
	awaitReady(t, ops)
	operator.get("/metrics").wants(http.StatusOK, "")
	operator.get("/api/events").wants(http.StatusNotFound, "NOT_FOUND")
	customer.get("/api/events").wants(http.StatusOK, "")
	for _, path := range []string{"/readyz", "/metrics", "/healthz"} {
		customer.get(path).wants(http.StatusNotFound, "NOT_FOUND")
	}
	shop.stop()
}

// The shop serves the metric that scales relays, and the probed paths.
func TestDeploy_probes(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("deploy/kubernetes.yaml")
	noError(t, err)
	shop := start(t, nil)
	c := newClient(t, shop.url)
	for _, match := range regexp.MustCompile(`metric: \{name: ([a-z_]+)\}`).FindAllStringSubmatch(string(text), -1) {
		testenv.Eventually(t, func() error { // after the relay's first look
			if metrics := string(c.get("/metrics").wants(200, "").body); !strings.Contains(metrics, "\n"+match[1]) {
				return fmt.Errorf("/metrics has no %s", match[1])
			}
			return nil
		})
	}
	probed := regexp.MustCompile(`httpGet: \{path: (/[a-z]+)`).FindAllStringSubmatch(string(text), -1)
	for _, match := range probed {
		c.get(match[1]).wants(200, "")
	}
	if len(probed) != 8 {
		t.Errorf("%d probes", len(probed))
	}
	shop.stop()
}

func acceptsHTML(t *testing.T, address string) (status int, body string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, address+"/", nil)
	noError(t, err)
	req.Header.Set("Accept", "text/html")
	resp, err := http.DefaultClient.Do(req)
	noError(t, err)
	defer func() { _ = resp.Body.Close() }()
	text, err := io.ReadAll(resp.Body)
	noError(t, err)
	return resp.StatusCode, string(text)
}

// The shop in memory has its page unless it is switched off. The page's stream does not delay the shutdown.
func TestShopPage_inMemory(t *testing.T) {
	t.Parallel()
	shop := start(t, nil)
	if status, body := acceptsHTML(t, shop.url); status != http.StatusOK || !strings.Contains(body, "Postgres off") || !strings.Contains(body, `href="/operator/"`) {
		t.Errorf("the page: %d %s", status, body)
	}
	awaitReady(t, shop.url)
	resp, err := http.Get(shop.url + "/shop/live?user=ada")
	noError(t, err)
	defer func() { _ = resp.Body.Close() }()
	if line := "the shop's page is " + shop.url + "/\n"; !strings.Contains(shop.stdout.String(), line) {
		t.Errorf("it prints %q", shop.stdout)
	}
	shop.stop()
	if strings.Contains(shop.stderr.String(), "did not stop") {
		t.Errorf("the stream delayed the shutdown: %s", shop.stderr)
	}

	bare := start(t, nil, "-page=false")
	if status, body := acceptsHTML(t, bare.url); status != http.StatusOK || !strings.HasPrefix(body, "A ticket shop.") {
		t.Errorf("without the page: %d %s", status, body)
	}
}

// TestShopPage_onServers checks that the page has no buttons that cause faults, and shows the limits from Redis.
func TestShopPage_onServers(t *testing.T) {
	t.Parallel()
	shop := start(t, newServices(t).env(), "-backend=services", "-page")
	awaitReady(t, shop.url)
	if status, body := acceptsHTML(t, shop.url); status != http.StatusOK || strings.Contains(body, "trials") || strings.Contains(body, "/operator/") {
		t.Errorf("the page: %d %s", status, body)
	}
	for _, path := range []string{"/shop/poison", "/shop/slow", "/shop/outage"} {
		if status := pressed(t, shop.url+path, url.Values{"on": {"true"}}); status != http.StatusNotFound {
			t.Errorf("%s: %d", path, status)
		}
	}
	newClient(t, shop.url).newEvent(`{"name":"Concert","seats":50}`)
	resp, err := http.Get(shop.url + "/shop/live?user=nobody")
	noError(t, err)
	defer func() { _ = resp.Body.Close() }()
	for lines := bufio.NewScanner(resp.Body); lines.Scan(); {
		if data, ok := strings.CutPrefix(lines.Text(), "data: "); ok {
			if !strings.Contains(data, `"name":"user","left":10`) || !strings.Contains(data, `"name":"global","left":999`) || strings.Contains(data, `"trials"`) {
				t.Errorf("the stream sent %s", data)
			}
			break
		}
	}
	shop.stop()
}

// pressed posts the form of a button on the page, and returns the status.
func pressed(t *testing.T, address string, fields url.Values) int {
	t.Helper()
	resp, err := http.PostForm(address, fields)
	noError(t, err)
	defer func() { _ = resp.Body.Close() }()
	return resp.StatusCode
}
