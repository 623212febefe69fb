package main_test

import (
	"bufio"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"testing"

	"github.com/holdfast-go/holdfast/internal/testenv"
)

// told is what a live page is told.
type told struct {
	Counts  map[string]int
	Steps   []struct{ Number int }
	Backlog struct{ Outbox, Queue, Dead int }
	Trials  *struct{ Slow bool }
}

// pressed does what a button of the page does, and returns the status.
func pressed(t *testing.T, address string, fields url.Values) int {
	t.Helper()
	resp, err := http.PostForm(address, fields)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	return resp.StatusCode
}

// awaitTold reads the page's stream until it tells what is wanted. The stream ends by itself after a minute.
func awaitTold(t *testing.T, address, what string, ok func(told) bool) {
	t.Helper()
	testenv.Eventually(t, func() error {
		resp, err := http.Get(address + "/shop/live?user=ada")
		if err != nil {
			return err
		}
		defer func() { _ = resp.Body.Close() }()
		last := ""
		for lines := bufio.NewScanner(resp.Body); lines.Scan(); {
			data, found := strings.CutPrefix(lines.Text(), "data: ")
			if !found {
				continue
			}
			last = data
			var state told
			state.Backlog.Outbox, state.Backlog.Queue, state.Backlog.Dead = -1, -1, -1 // what is not known is null
			if err := json.Unmarshal([]byte(data), &state); err != nil {
				return err
			}
			if ok(state) {
				return nil
			}
		}
		return fmt.Errorf("%s: the stream tells %s", what, last)
	})
}

// TestTrialsAcrossProcesses has each role in a process of its own: the page of one shows what goes through all of them, a
// poison message dies while others go on, and the consumer is slow for as long as the page says so. The flow is a view that
// may count twice, and a message that comes again is counted again.
func TestTrialsAcrossProcesses(t *testing.T) {
	brokers(t, func(t *testing.T, flags ...string) {
		env := newServices(t).env()
		role := func(name, flag string) *process {
			return start(t, env, append([]string{"-backend=services", "-role=" + name, flag}, flags...)...)
		}
		api, relay, consumer := role("api", "-trials"), role("relay", "-page"), role("consumer", "-trials")
		awaitReady(t, api.url)
		if status, body := acceptsHTML(t, api.url); status != http.StatusOK || !strings.Contains(body, "A poison message") || strings.Contains(body, "Postgres off") {
			t.Errorf("the page: %d %s", status, body)
		}
		c := newClient(t, api.url)
		event := c.newEvent(`{"name":"Concert","seats":50}`)
		const first, all = 10, 40
		for range first {
			c.hold(newUser(), event, `"quantity":1`)
		}
		awaitTold(t, api.url, "the way of all", func(s told) bool {
			return s.Counts["request"] >= 1+first && s.Counts["transaction"] >= 1+first && s.Counts["published"] >= first &&
				s.Counts["processed"] >= first && s.Counts["updated"] >= first && s.Backlog.Outbox == 0 && s.Backlog.Queue == 0 &&
				s.Trials != nil && !s.Trials.Slow && s.Steps[len(s.Steps)-1].Number >= 2+5*first
		})

		if status := pressed(t, api.url+"/shop/poison", nil); status != http.StatusNoContent {
			t.Fatalf("poison: %d", status)
		}
		awaitTold(t, api.url, "a dead letter", func(s told) bool { return s.Backlog.Dead == 1 && s.Counts["failed"] >= 1 })

		slow := func(on string) {
			if status := pressed(t, api.url+"/shop/slow", url.Values{"on": {on}}); status != http.StatusNoContent {
				t.Fatalf("slow %s: %d", on, status)
			}
		}
		slow("true")
		for range all - first {
			c.hold(newUser(), event, `"quantity":1`)
		}
		awaitTold(t, api.url, "a queue", func(s told) bool {
			return s.Trials != nil && s.Trials.Slow && s.Backlog.Queue > 0 && s.Counts["published"] >= 1+all
		})
		slow("false")
		awaitTold(t, api.url, "all have arrived", func(s told) bool {
			return s.Trials != nil && !s.Trials.Slow && s.Counts["updated"] >= all && s.Backlog.Queue == 0 && s.Backlog.Dead == 1
		})
		for _, p := range []*process{api, relay, consumer} {
			p.stop()
		}
	})
}
