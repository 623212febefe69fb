package main_test

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/holdfast-go/holdfast/internal/testenv"
)

// The shop starts and sells while the broker is away. When it comes, the messages that were stored meanwhile reach
// the read model.
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

// Without Redis the api starts, serves what needs none, and is not ready.
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

// A wrong password ends the process with one line that says so.
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
