package main_test

import (
	"cmp"
	"encoding/hex"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"

	collector "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	"google.golang.org/protobuf/proto"

	"github.com/holdfast-go/holdfast/internal/testenv"
)

func TestScenario_inMemory(t *testing.T) {
	t.Parallel()
	shop := start(t, nil, "-backend=memory")
	scenario(t, newClient(t, shop.url), inFlightByCrowd)
	shop.stop()
}

// Each role runs in its own processes, which all end by a signal.
func TestScenario_onServers(t *testing.T) { brokers(t, testScenarioOnServers, onNATS) }

func testScenarioOnServers(t *testing.T, flags ...string) {
	s := newServices(t, flags...)
	var all []*process
	for _, role := range []string{"api", "relay", "relay", "consumer", "consumer", "sweeper"} {
		all = append(all, start(t, s.env(), slices.Concat(flags, []string{"-backend=services", "-role=" + role, "-sweep=@every 1s"})...))
	}
	for _, p := range all {
		awaitReady(t, p.url)
	}
	c := newClient(t, all[0].url)
	event, lost := scenario(t, c, func(t *testing.T, c *client) { inFlightByLock(t, c, s) })
	passDeadlines(t, s)
	testenv.Eventually(t, func() error {
		if got, want := c.stats(event), (stats{Confirmed: 1, Cancelled: 1, Expired: 2}); got != want {
			return fmt.Errorf("stats are %+v, want %+v", got, want)
		}
		return nil
	})
	if got := c.seats(event); c.status(lost) != "expired" || got["confirmed"] != 2 || got["held"] != 0 || got["free"] != 28 {
		t.Errorf("%s, seats are %v, want expired, 2 confirmed and 28 free", c.status(lost), got)
	}
	healthy(t, s.env(), flags...)
	for _, p := range all {
		p.stop()
	}
}

// passDeadlines moves the deadlines of all holds into the past.
func passDeadlines(t *testing.T, s services) {
	t.Helper()
	var moved int
	err := pgxScan(t.Context(), s, &moved, `with seats as (update seats set held_until = now() - interval '1 second' where state = 'held'),
		due as (update reservations set expires_at = now() - interval '1 second' where status = 'held' returning id) select count(*) from due`)
	if err != nil || moved == 0 {
		t.Fatalf("moved %d deadlines: %v", moved, err)
	}
}

// With a Docker engine the shop runs on containers at night. Without one it fails with one line.
func TestScenario_onContainers(t *testing.T) {
	t.Parallel()
	if dockerListens() {
		testenv.Nightly(t, "pulls images")
	}
	shop, listening := launch(t, os.Environ(), "-backend=containers")
	select {
	case shop.url = <-listening:
		scenario(t, newClient(t, shop.url), inFlightByCrowd)
		shop.stop()
	case <-shop.ended:
		errs := shop.stderr.String()
		if dockerListens() || shop.cmd.ProcessState.ExitCode() != 1 || shop.stdout.String() != "" ||
			strings.Count(errs, "\n") != 1 || !strings.Contains(errs, "needs a Docker engine") {
			t.Errorf("%v, %q, %q; want exit code 1 and one line", shop.err, shop.stdout, errs)
		}
	}
}

func dockerListens() bool {
	network, address, _ := strings.Cut(cmp.Or(os.Getenv("DOCKER_HOST"), "unix:///var/run/docker.sock"), "://")
	conn, err := net.Dial(network, address)
	if err != nil {
		return false
	}
	_ = conn.Close() // nothing was sent
	return true
}

// A new user can run the lines that the shop prints.
func TestScenario_printedLines(t *testing.T) {
	t.Parallel()
	for _, tool := range []string{"bash", "curl"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Skipf("the printed lines need %s: %v", tool, err)
		}
	}
	shop := start(t, nil, "-backend=memory")
	var lines []string
	testenv.Eventually(t, func() error {
		_, after, _ := strings.Cut(shop.stdout.String(), "in this order:\n")
		if lines = strings.Split(after, "\n"); len(lines) != 4 {
			return fmt.Errorf("it prints %q", shop.stdout)
		}
		return nil
	})
	for _, replayed := range []bool{false, true} {
		out, err := exec.CommandContext(t.Context(), "bash", "-euc", strings.Join(lines, "\n")).Output()
		for _, part := range []string{`"name":"Concert"`, `"status":"held"`, `"status":"confirmed"`} {
			if err != nil || !strings.Contains(string(out), part) {
				t.Errorf("%v, the lines print %q, not %s", err, out, part)
			}
		}
		if got := strings.Contains(string(out), "Idempotency-Replayed: true"); got != replayed {
			t.Errorf("the lines print %q, want replayed: %v", out, replayed)
		}
	}
	c := newClient(t, shop.url)
	var list struct{ Events []struct{ ID string } }
	c.get("/api/events").wants(http.StatusOK, "").into(&list)
	if len(list.Events) != 1 || c.seats(list.Events[0].ID)["confirmed"] != 2 {
		t.Errorf("after the lines there are events %v", list.Events)
	}
	shop.stop()
}

// scenario sells seats of an event, on any servers. It leaves two holds, and returns one of them.
func scenario(t *testing.T, c *client, inFlight func(*testing.T, *client)) (event, lost string) {
	t.Helper()
	awaitReady(t, c.url)
	event = c.newEvent(`{"name":"Concert","seats":30}`)

	ada := newUser()
	kept := c.hold(ada, event, `"seats":["A1","A2"]`)
	c.post(newUser(), newKey(), "/api/reservations", holdBody(event, `"seats":["A2","A3"]`)).wants(http.StatusConflict, "SEATS_UNAVAILABLE")
	c.post(newUser(), newKey(), "/api/reservations/"+kept.ID+"/confirm", "").wants(http.StatusForbidden, "NOT_YOUR_RESERVATION")
	c.post(ada, newKey(), "/api/reservations/"+kept.ID+"/confirm", "").wants(http.StatusOK, "")
	c.post(ada, newKey(), "/api/reservations/"+kept.ID+"/cancel", "{}").wants(http.StatusConflict, "RESERVATION_NOT_HELD")

	given := c.hold(ada, event, `"quantity":3`)
	c.post(ada, newKey(), "/api/reservations/"+given.ID+"/cancel", "{}").wants(http.StatusOK, "")
	lost = c.hold(newUser(), event, `"quantity":4`).ID

	replays(t, c, event)
	inFlight(t, c)
	limits(t, c)

	testenv.Eventually(t, func() error {
		if got, want := c.stats(event), (stats{Held: 2, Confirmed: 1, Cancelled: 1}); got != want && got.Expired == 0 {
			return fmt.Errorf("stats are %+v, want %+v", got, want)
		}
		return nil
	})

	c.get("/healthz").wants(http.StatusOK, "")
	metrics := c.get("/metrics").wants(http.StatusOK, "")
	for _, name := range []string{"holdfast_txretry", "holdfast_idempotency", "go_goroutines"} {
		if !strings.Contains(string(metrics.body), name) {
			t.Errorf("no %s in the metrics", name)
		}
	}
	return event, lost
}

// replays holds one seat, which nobody confirms.
func replays(t *testing.T, c *client, event string) {
	t.Helper()
	eve, key, body := newUser(), newKey(), holdBody(event, `"quantity":1`)
	first := c.post(eve, key, "/api/reservations", body).wants(http.StatusCreated, "")
	for range 15 { // more than the limit: replays are free
		again := c.post(eve, key, "/api/reservations", body).wants(http.StatusCreated, "")
		if string(again.body) != string(first.body) || again.header.Get("Idempotency-Replayed") != "true" {
			t.Fatalf("replay with %v: %s, want %s", again.header, again.body, first.body)
		}
	}
	c.post(eve, key, "/api/reservations", holdBody(event, `"quantity":2`)).wants(http.StatusUnprocessableEntity, "IDEMPOTENCY_KEY_REUSED")
}

func limits(t *testing.T, c *client) {
	t.Helper()
	user := newUser()
	for range 25 { // the limit is 10, a minute may end in between
		r := c.post(user, newKey(), "/api/events", `{"name":"Matinee","seats":1}`)
		if r.status == http.StatusCreated {
			continue
		}
		r.wants(http.StatusTooManyRequests, "RATE_LIMITED")
		if r.header.Get("Retry-After") == "" {
			t.Error("429 without Retry-After")
		}
		return
	}
	t.Error("no request was limited")
}

// inFlightByLock makes a request wait for a lock that the test holds.
func inFlightByLock(t *testing.T, c *client, s services) {
	t.Helper()
	event := c.newEvent(`{"name":"Rush","seats":1}`)
	conn, release := hold(t, s, "select from seats where event_id = $1 for update", event)
	user, key, body := newUser(), newKey(), holdBody(event, `"quantity":1`)
	first := make(chan reply, 1)
	go func() {
		r, _ := c.tryPost(user, key, "/api/reservations", body) // a failure has status 0
		first <- r
	}()
	awaitBlocked(t, s, conn, 1)
	r := c.post(user, key, "/api/reservations", body).wants(http.StatusConflict, "IDEMPOTENCY_KEY_IN_USE")
	if r.header.Get("Retry-After") == "" {
		t.Error("409 in flight without Retry-After")
	}
	release()
	done := <-first
	done.t = t
	done.wants(http.StatusCreated, "")
	c.post(user, key, "/api/reservations", body).wants(http.StatusCreated, "")
}

// inFlightByCrowd sends a request many times at once, beside others that keep the shop busy, until two of them overlap.
func inFlightByCrowd(t *testing.T, c *client) {
	t.Helper()
	testenv.Eventually(t, func() error {
		user, key := newUser(), newKey()
		var crowd sync.WaitGroup
		replies := make(chan reply, 20)
		for i := range 40 {
			crowd.Go(func() {
				if i%2 == 0 {
					_, _ = c.tryPost(newUser(), newKey(), "/api/events", `{"name":"Stadium","seats":10000}`) // only to keep it busy
					return
				}
				r, _ := c.tryPost(user, key, "/api/events", `{"name":"Rush","seats":10000}`) // a failure has status 0
				replies <- r
			})
		}
		crowd.Wait()
		close(replies)
		met := false
		for r := range replies {
			inUse := r.status == http.StatusConflict && r.code() == "IDEMPOTENCY_KEY_IN_USE"
			if !inUse && r.status != http.StatusCreated && r.status != http.StatusTooManyRequests {
				t.Fatalf("answer is %d: %s", r.status, r.body)
			}
			met = met || inUse
		}
		if !met {
			return fmt.Errorf("no two requests overlapped")
		}
		return nil
	})
}

// The shop starts and sells while the broker is down. When the broker is back, the stored messages reach the
// read model.
func TestStart_withoutBroker(t *testing.T) {
	t.Parallel()
	s := newServices(t)
	broker := testenv.NewProxy(t, s.amqpURL)
	broker.Cut()
	s.amqpURL = broker.URL()
	shop := start(t, s.env(), "-backend=services")
	api := start(t, s.env(), "-backend=services", "-role=api")
	awaitReady(t, api.url)
	c := newClient(t, shop.url)
	event := c.newEvent(`{"name":"Concert","seats":10}`)
	held := c.hold("ada", event, `"seats":["A1"]`)
	c.post("ada", newKey(), "/api/reservations/"+held.ID+"/confirm", "").wants(http.StatusOK, "")
	awaitNotReady(t, c, `["consumer","relay"]`)
	broker.Heal()
	awaitReady(t, shop.url)
	testenv.Eventually(t, func() error {
		if got := c.stats(event); got != (stats{Confirmed: 1}) {
			return fmt.Errorf("stats are %+v", got)
		}
		return nil
	})
	shop.stop()
	api.stop()
}

// Without Redis the api starts, serves requests that do not need Redis, and is not ready.
func TestStart_withoutRedis(t *testing.T) {
	t.Parallel()
	s := newServices(t)
	s.redisURL = nowhere.redisURL
	api := start(t, s.env(), "-backend=services", "-role=api")
	c := newClient(t, api.url)
	c.get("/api/events").wants(http.StatusOK, "")
	awaitNotReady(t, c, `["redis"]`)
	api.stop()
}

// An unknown database ends the process with one line that names it.
func TestStart_refused(t *testing.T) {
	t.Parallel()
	testenv.Nightly(t, "a refusal is tried for 5 s")
	s := newServices(t)
	path := strings.LastIndex(s.databaseURL, "/")
	s.databaseURL = s.databaseURL[:path] + "/nowhere"
	code, _, errs := command(t, s.env(), "-backend=services")
	if last := lastLine(errs); code != 1 || !strings.Contains(last, "service: postgres: refused: ") || !strings.Contains(last, "nowhere") {
		t.Errorf("exit code %d: %s", code, errs)
	}
}

func lastLine(text string) string {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	return lines[len(lines)-1]
}

// awaitNotReady waits until the readiness probe names exactly these parts.
func awaitNotReady(t *testing.T, c *client, waitingFor string) {
	t.Helper()
	testenv.Eventually(t, func() error {
		r, err := c.tryGet("/readyz")
		if err == nil && (r.status != http.StatusServiceUnavailable || !strings.Contains(string(r.body), waitingFor)) {
			err = fmt.Errorf("answer %d: %s", r.status, r.body)
		}
		return err
	})
}

// One reservation is one trace: through three processes, from the request to the read model. Relay and consumer end by
// themselves after one message.
func TestTrace_acrossProcesses(t *testing.T) {
	brokers(t, func(t *testing.T, flags ...string) {
		spans := &collected{}
		otlp := httptest.NewServer(spans)
		t.Cleanup(otlp.Close)
		env := append(newServices(t, flags...).env(), "OTEL_EXPORTER_OTLP_ENDPOINT="+otlp.URL, "OTEL_BSP_SCHEDULE_DELAY=50")
		run := func(role string, more ...string) *process {
			return start(t, env, slices.Concat([]string{"-backend=services", "-role=" + role}, flags, more)...)
		}
		api, relay, consumer := run("api"), run("relay", "-message-limit=1"), run("consumer", "-message-limit=1")
		c := newClient(t, api.url)
		event := c.newEvent(`{"name":"Concert","seats":10}`)

		const (
			traceID = "0af7651916cd43dd8448eb211c80319c"
			caller  = "b7ad6b7169203331"
		)
		req, err := http.NewRequest(http.MethodPost, api.url+"/api/reservations", strings.NewReader(holdBody(event, `"seats":["A1"]`)))
		noError(t, err)
		for name, value := range map[string]string{
			"X-Mock-User-Id": newUser(), "Idempotency-Key": newKey(), "Content-Type": "application/json",
			"traceparent": "00-" + traceID + "-" + caller + "-01",
		} {
			req.Header.Set(name, value)
		}
		answer, err := c.send(req)
		noError(t, err)
		answer.wants(http.StatusCreated, "")
		for _, p := range []*process{relay, consumer} {
			<-p.ended
			if p.err != nil || !strings.Contains(p.stderr.String(), "it has handled 1 messages") {
				t.Errorf("ended with %v\n%s", p.err, p.stderr)
			}
		}
		system := "rabbitmq"
		if len(flags) > 0 {
			system = strings.TrimPrefix(flags[0], "-broker=")
		}
		// By the names of the spans, from the caller to the leaves.
		const request = "POST /api/reservations > txretry.Do > txretry.attempt > create reservation.held"
		process := "consumer " + request + " > process QUEUE by " + system
		want := []string{
			"api POST /api/reservations", "api POST /api/reservations > txretry.Do", "api POST /api/reservations > txretry.Do > txretry.attempt",
			"api " + request, "relay " + request + " > send reservation.held by " + system,
			process, process + " > txretry.Do", process + " > txretry.Do > txretry.attempt", process + " > txretry.Do > txretry.attempt > read model",
		}
		slices.Sort(want)
		testenv.Eventually(t, func() error {
			if got := spans.paths(traceID, caller); !slices.Equal(got, want) {
				return fmt.Errorf("the trace has the spans\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
			}
			return nil
		})
	})
}

// collected is a collector of OTLP over HTTP that keeps all spans.
type collected struct {
	mu    sync.Mutex
	spans []collectedSpan
}

type collectedSpan struct{ trace, id, parent, name, role string }

func (c *collected) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	var export collector.ExportTraceServiceRequest
	if err == nil {
		err = proto.Unmarshal(body, &export)
	}
	if err != nil || r.URL.Path != "/v1/traces" {
		http.Error(w, fmt.Sprint(r.URL.Path, err), http.StatusBadRequest)
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, process := range export.ResourceSpans {
		role := ""
		for _, kv := range process.Resource.Attributes {
			if kv.Key == "reservation.role" {
				role = kv.Value.GetStringValue()
			}
		}
		for _, scope := range process.ScopeSpans {
			for _, s := range scope.Spans {
				span := collectedSpan{hex.EncodeToString(s.TraceId), hex.EncodeToString(s.SpanId), hex.EncodeToString(s.ParentSpanId), s.Name, role}
				if strings.HasPrefix(s.Name, "process ") {
					span.name = "process QUEUE" // or stream
				}
				for _, kv := range s.Attributes {
					if kv.Key == "messaging.system" {
						span.name += " by " + kv.Value.GetStringValue()
					}
				}
				c.spans = append(c.spans, span)
			}
		}
	}
	w.Header().Set("Content-Type", "application/x-protobuf")
}

// paths returns the spans of a trace in order, each with its process and its parents up to the caller. A missing parent
// is a question mark.
func (c *collected) paths(traceID, caller string) []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	byID := map[string]collectedSpan{}
	for _, s := range c.spans {
		if s.trace == traceID {
			byID[s.id] = s
		}
	}
	var path func(id string) string
	path = func(id string) string {
		switch s, ok := byID[id]; {
		case !ok:
			return "?"
		case s.parent == caller:
			return s.name
		default:
			return path(s.parent) + " > " + s.name
		}
	}
	var all []string
	for id, s := range byID {
		all = append(all, s.role+" "+path(id))
	}
	slices.Sort(all)
	return all
}
