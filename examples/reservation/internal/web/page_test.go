package web_test

import (
	"net/http"
	"net/url"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/holdfast-go/holdfast/examples/reservation/internal/web"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

func TestHomeIsForBrowsers(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	browser := s.do(http.MethodGet, "/", "", "Accept", "text/html,application/xhtml+xml,*/*;q=0.8")
	if browser.StatusCode != http.StatusOK || !strings.HasPrefix(browser.Header.Get("Content-Type"), "text/html") {
		t.Errorf("a browser is answered %d, %s", browser.StatusCode, browser.Header.Get("Content-Type"))
	}
	if other := s.do(http.MethodGet, "/", "", "Accept", "*/*"); other.StatusCode != http.StatusOK || !strings.Contains(other.body, "POST /api/reservations") {
		t.Errorf("others are answered %d, %s", other.StatusCode, other.body)
	}
	if post := s.do(http.MethodPost, "/", "", "Accept", "text/html"); post.StatusCode != http.StatusMethodNotAllowed {
		t.Errorf("a POST is answered %d", post.StatusCode)
	}
	if browser.Header.Get("Vary") != "Accept" {
		t.Errorf("Vary is %q", browser.Header.Get("Vary"))
	}
}

// TestPageLoadsNothingFromElsewhere loads all that the page names, and wants it to be the page's own.
func TestPageLoadsNothingFromElsewhere(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	home := s.do(http.MethodGet, "/", "", "Accept", "text/html")
	if policy := home.Header.Get("Content-Security-Policy"); !strings.Contains(policy, "default-src 'none'") || strings.Contains(policy, "unsafe") {
		t.Errorf("policy %q", policy)
	}
	if regexp.MustCompile(`<style|style=|<script>|\son[a-z]+=`).MatchString(home.body) {
		t.Error("the page holds what its policy forbids")
	}
	names := regexp.MustCompile(`(?:src|href)="(/shop/[^"]*)"`).FindAllStringSubmatch(home.body, -1)
	modules := regexp.MustCompile(`from "\./([a-z]+\.js)"`)
	seen := map[string]bool{}
	var load func(path string)
	load = func(path string) {
		if seen[path] {
			return
		}
		seen[path] = true
		file := s.do(http.MethodGet, path, "")
		if file.StatusCode != http.StatusOK || file.Header.Get("X-Content-Type-Options") != "nosniff" {
			t.Errorf("%s: %d, %v", path, file.StatusCode, file.Header)
		}
		for _, m := range modules.FindAllStringSubmatch(file.body, -1) {
			load("/shop/" + m[1])
		}
	}
	for _, name := range names {
		load(name[1])
	}
	if len(seen) != 7 {
		t.Errorf("loaded %v, want a style, an icon and five scripts", seen)
	}
}

func TestWithoutTrialsNothingCanBeBroken(t *testing.T) {
	t.Parallel()
	s := newShop(t, func(c *web.Config) { c.Trials, c.Servers, c.Operator = nil, nil, "/operator/" })
	home := s.do(http.MethodGet, "/", "", "Accept", "text/html").body
	if strings.Contains(home, "poison") || strings.Contains(home, "Postgres off") {
		t.Error("the page has buttons that do nothing")
	}
	if !strings.Contains(home, `href="/operator/"`) {
		t.Error("the page does not lead to the operator's")
	}
	for _, path := range []string{"/shop/poison", "/shop/slow", "/shop/outage"} {
		if a := s.press(path, nil); a.StatusCode != http.StatusNotFound {
			t.Errorf("%s: %d", path, a.StatusCode)
		}
	}
	if with := newShop(t).do(http.MethodGet, "/", "", "Accept", "text/html").body; strings.Contains(with, "/operator/") {
		t.Error("the page leads to an operator's page that is not there")
	}
}

func TestAPIAnswersAsWithoutPage(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	for _, path := range []string{"/api//events", "/api/events/", "/nothing"} {
		if a := s.do(http.MethodGet, path, "", "Accept", "text/html"); a.StatusCode != http.StatusNotFound || !strings.Contains(a.body, "NOT_FOUND") {
			t.Errorf("%s: %d %s", path, a.StatusCode, a.body)
		}
	}
}

func TestConfigIsComplete(t *testing.T) {
	t.Parallel()
	if _, err := web.New(web.Config{}); err == nil {
		t.Error("a page without a shop")
	}
}

func (s *shop) pressed(path string, fields url.Values) {
	s.t.Helper()
	if a := s.press(path, fields); a.StatusCode != http.StatusNoContent {
		s.t.Fatalf("%s %v: %d %s", path, fields, a.StatusCode, a.body)
	}
}

func (s *shop) outage(server string, on string) {
	s.t.Helper()
	s.pressed("/shop/outage", url.Values{"server": {server}, "on": {on}})
}

// TestOutages takes each server away and gives it back: what was refused is done then, and what was taken arrives.
func TestOutages(t *testing.T) {
	t.Parallel()
	for server, refusal := range map[string]string{"postgres": "IDEMPOTENCY_STORE_UNAVAILABLE", "redis": "RATE_LIMIT_UNAVAILABLE", "rabbitmq": ""} {
		t.Run(server, func(t *testing.T) {
			t.Parallel()
			s := newShop(t)
			event := s.newEvent()
			s.outage(server, "true")
			s.await("the outage", func(st state) bool { return st.Trials.Off[server] })
			a := s.hold(event)
			switch {
			case refusal == "" && a.StatusCode != http.StatusCreated:
				t.Fatalf("without %s: %d %s", server, a.StatusCode, a.body)
			case refusal != "" && (a.StatusCode != http.StatusServiceUnavailable || !strings.Contains(a.body, refusal) || a.Header.Get("Retry-After") == ""):
				t.Fatalf("without %s: %d %v %s", server, a.StatusCode, a.Header, a.body)
			}
			if refusal == "" {
				s.await("the message waits", func(st state) bool { return st.Backlog.Outbox == 1 && st.Counts["published"] == 0 })
			}
			s.outage(server, "false")
			if refusal != "" {
				if a := s.hold(event); a.StatusCode != http.StatusCreated {
					t.Fatalf("with %s again: %d %s", server, a.StatusCode, a.body)
				}
			}
			s.await("the message has arrived", func(st state) bool {
				return st.Counts["updated"] == 1 && st.Backlog.Outbox == 0 && !st.Trials.Off[server]
			})
		})
	}
}

func TestPoisonIsADeadLetterAndTheRestGoesOn(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	event := s.newEvent()
	s.pressed("/shop/poison", nil)
	s.hold(event)
	s.await("one letter, one update", func(st state) bool {
		return st.Backlog.Dead == 1 && st.Counts["failed"] == 1 && st.Counts["updated"] == 1
	})
	for range 999 {
		s.pressed("/shop/poison", nil)
	}
	s.await("all are dead", func(st state) bool { return st.Backlog.Dead == 1000 })
	if a := s.press("/shop/poison", nil); a.StatusCode != http.StatusServiceUnavailable {
		t.Errorf("letter 1,001: %d", a.StatusCode)
	}
	s = newShop(t)
	s.outage("rabbitmq", "true")
	if a := s.press("/shop/poison", nil); a.StatusCode != http.StatusServiceUnavailable {
		t.Errorf("without a broker: %d", a.StatusCode)
	}
}

// Messages wait while the consumer is slow and requests are answered.
func TestSlowConsumer(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	event := s.newEvent()
	s.pressed("/shop/slow", url.Values{"on": {"true"}})
	const holds = 10
	for range holds {
		s.hold(event)
	}
	s.await("a queue", func(st state) bool { return st.Trials.Slow && st.Counts["request"] == holds+1 && st.Backlog.Queue > 0 })
	s.pressed("/shop/slow", url.Values{"on": {"false"}})
	s.await("no slowness", func(st state) bool { return !st.Trials.Slow })
}

func TestOtherSitesBreakNothing(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	fields := url.Values{"server": {"redis"}, "on": {"true"}}.Encode()
	a := s.do(http.MethodPost, "/shop/outage", fields, "Content-Type", "application/x-www-form-urlencoded", "Sec-Fetch-Site", "cross-site")
	if a.StatusCode != http.StatusForbidden || s.demo.Redis.Off() {
		t.Errorf("%d, off %v", a.StatusCode, s.demo.Redis.Off())
	}
}

func TestWrongSwitches(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	for name, fields := range map[string]url.Values{
		"unknown server": {"server": {"disk"}, "on": {"true"}}, "no server": {"on": {"true"}}, "no switch": {"server": {"redis"}},
		"too much": {"server": {"redis"}, "on": {strings.Repeat("1", 5000)}},
	} {
		if a := s.press("/shop/outage", fields); a.StatusCode != http.StatusBadRequest {
			t.Errorf("%s: %d", name, a.StatusCode)
		}
	}
	if a := s.press("/shop/slow", nil); a.StatusCode != http.StatusBadRequest {
		t.Errorf("slow: %d", a.StatusCode)
	}
	for _, server := range s.demo.Servers() {
		if err := server.Ready(t.Context()); err != nil {
			t.Error(err)
		}
	}
}

// TestReplayIsSeen sends a request twice with one key.
func TestReplayIsSeen(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	body := `{"event_id":"` + s.newEvent() + `","quantity":1}`
	header := []string{"X-Mock-User-Id", "ada", "Idempotency-Key", "0123456789ab4def8123456789abcdef", "Content-Type", "application/json"}
	first := s.do(http.MethodPost, "/api/reservations", body, header...)
	second := s.do(http.MethodPost, "/api/reservations", body, header...)
	if first.StatusCode != http.StatusCreated || second.body != first.body {
		t.Fatalf("%d %s, then %d %s", first.StatusCode, first.body, second.StatusCode, second.body)
	}
	s.await("the replay", func(st state) bool {
		replayed := false
		for _, step := range st.Steps {
			replayed = replayed || step.Text == "POST /api/reservations: 201, replayed"
		}
		return replayed && st.Counts["transaction"] == 2 && st.Counts["updated"] == 1
	})
}

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }
