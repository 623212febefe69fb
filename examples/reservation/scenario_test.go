package main_test

import (
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/holdfast-go/holdfast/internal/testenv"
)

// The scenario confirms and cancels well before this is over, on a busy machine too.
const scenarioHold = "-hold=30s"

func TestScenarioInMemory(t *testing.T) {
	t.Parallel()
	shop := start(t, nil, "-backend=memory", scenarioHold)
	c := newClient(t, shop.url)
	scenario(t, c, inFlightByCrowd)
	shop.stop()
}

func TestScenarioOnServers(t *testing.T) { brokers(t, testScenarioOnServers) }

func testScenarioOnServers(t *testing.T, flags ...string) {
	s := newServices(t)
	var all []*process
	run := func(role string, n int) {
		for range n {
			args := []string{"-backend=services", "-role=" + role, scenarioHold, "-sweep=@every 1s"}
			all = append(all, start(t, s.env(), slices.Concat(flags, args)...))
		}
	}
	run("api", 1)
	run("relay", 2)
	run("consumer", 2)
	run("sweeper", 2)
	for _, p := range all {
		awaitReady(t, p.url)
	}
	scenario(t, newClient(t, all[0].url), func(t *testing.T, c *client) { inFlightByLock(t, c, s) })
	healthy(t, s.env(), flags...)
	for _, p := range all {
		p.stop()
	}
}

// TestScenarioInOneProcess leaves the schedule at every half hour: holds expire when they fall due all the same.
func TestScenarioInOneProcess(t *testing.T) {
	t.Parallel()
	s := newServices(t)
	shop := start(t, s.env(), "-backend=services", scenarioHold)
	scenario(t, newClient(t, shop.url), func(t *testing.T, c *client) { inFlightByLock(t, c, s) })
	shop.stop()
}

// TestPrintedLines runs what the shop prints for a new user to try.
func TestPrintedLines(t *testing.T) {
	t.Parallel()
	for _, tool := range []string{"bash", "curl"} {
		if _, err := exec.LookPath(tool); err != nil {
			if os.Getenv(testenv.RequireVar) == "1" {
				t.Fatal(err)
			}
			t.Skipf("the printed lines need %s: %v", tool, err)
		}
	}
	shop := start(t, nil, "-backend=memory")
	var lines []string
	testenv.Eventually(t, func() error {
		_, after, _ := strings.Cut(shop.stdout.String(), "in this order:\n")
		if lines = strings.Split(after, "\n"); len(lines) != 4 {
			return fmt.Errorf("it says %q", shop.stdout)
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

func awaitReady(t *testing.T, url string) {
	t.Helper()
	c := newClient(t, url)
	testenv.Eventually(t, func() error {
		r, err := c.tryGet("/readyz")
		if err == nil && r.status != http.StatusOK {
			err = fmt.Errorf("%s is not ready: %s", url, r.body)
		}
		return err
	})
}

// scenario is what a shop does, whatever it stands on.
func scenario(t *testing.T, c *client, inFlight func(*testing.T, *client)) {
	awaitReady(t, c.url)
	event := c.newEvent(`{"name":"Concert","seats":30}`)

	ada := newUser()
	kept := c.hold(ada, event, `"seats":["A1","A2"]`)
	c.post(newUser(), newKey(), "/api/reservations", holdBody(event, `"seats":["A2","A3"]`)).wants(http.StatusConflict, "SEATS_UNAVAILABLE")
	c.post(newUser(), newKey(), "/api/reservations/"+kept.ID+"/confirm", "").wants(http.StatusForbidden, "NOT_YOUR_RESERVATION")
	c.post(ada, newKey(), "/api/reservations/"+kept.ID+"/confirm", "").wants(http.StatusOK, "")
	c.post(ada, newKey(), "/api/reservations/"+kept.ID+"/cancel", "{}").wants(http.StatusConflict, "RESERVATION_NOT_HELD")

	given := c.hold(ada, event, `"quantity":3`)
	c.post(ada, newKey(), "/api/reservations/"+given.ID+"/cancel", "{}").wants(http.StatusOK, "")
	lost := c.hold(newUser(), event, `"quantity":4`)

	replays(t, c, event)
	inFlight(t, c)
	limits(t, c)

	testenv.Eventually(t, func() error {
		if got := c.status(lost.ID); got != "expired" {
			return fmt.Errorf("reservation is %s, want expired", got)
		}
		return nil
	})
	testenv.Eventually(t, func() error {
		if got, want := c.stats(event), (stats{Confirmed: 1, Cancelled: 1, Expired: 2}); got != want {
			return fmt.Errorf("stats are %+v, want %+v", got, want)
		}
		return nil
	})
	if got := c.seats(event); got["confirmed"] != 2 || got["held"] != 0 || got["free"] != 28 {
		t.Errorf("seats are %v, want 2 confirmed and 28 free", got)
	}

	c.get("/healthz").wants(http.StatusOK, "")
	metrics := c.get("/metrics").wants(http.StatusOK, "")
	for _, name := range []string{"holdfast_txretry", "holdfast_idempotency", "go_goroutines"} {
		if !strings.Contains(string(metrics.body), name) {
			t.Errorf("no %s in the metrics", name)
		}
	}
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

// inFlightByLock has a request wait for a lock that the test holds.
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

// inFlightByCrowd sends a request many times at once, behind others that keep the shop busy, until one meets another.
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
			return fmt.Errorf("no two requests met")
		}
		return nil
	})
}
