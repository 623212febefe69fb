package web_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"regexp"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/examples/reservation/internal/booking"
	"github.com/holdfast-go/holdfast/examples/reservation/internal/flow"
	"github.com/holdfast-go/holdfast/examples/reservation/internal/httpapi"
	"github.com/holdfast-go/holdfast/examples/reservation/internal/memory"
	"github.com/holdfast-go/holdfast/examples/reservation/internal/web"
	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/ratelimit"
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

// TestPageLoadsNothingFromElsewhere loads all files that the page names. They must be the page's own.
func TestPageLoadsNothingFromElsewhere(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	home := s.do(http.MethodGet, "/", "", "Accept", "text/html")
	if policy := home.Header.Get("Content-Security-Policy"); !strings.Contains(policy, "default-src 'none'") || strings.Contains(policy, "unsafe") {
		t.Errorf("policy %q", policy)
	}
	if regexp.MustCompile(`<style|style=|<script>|\son[a-z]+=`).MatchString(home.body) {
		t.Error("the page has inline code, which its policy forbids")
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
		t.Error("the page does not link to the operator's page")
	}
	for _, path := range []string{"/shop/poison", "/shop/slow", "/shop/outage"} {
		if a := s.press(path, nil); a.StatusCode != http.StatusNotFound {
			t.Errorf("%s: %d", path, a.StatusCode)
		}
	}
	if with := newShop(t).do(http.MethodGet, "/", "", "Accept", "text/html").body; strings.Contains(with, "/operator/") {
		t.Error("the page links to an operator's page that does not exist")
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

// TestOutages switches each server off and on. Rejected requests then succeed, and the messages of accepted ones arrive.
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

func TestPoison_becomesDeadLetter(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	event := s.newEvent()
	s.pressed("/shop/poison", nil)
	s.hold(event)
	s.await("one dead letter, one update", func(st state) bool {
		return st.Backlog.Dead == 1 && st.Counts["failed"] == 1 && st.Counts["updated"] == 1
	})
	for range 999 {
		s.pressed("/shop/poison", nil)
	}
	s.await("all are dead", func(st state) bool { return st.Backlog.Dead == 1000 })
	if a := s.press("/shop/poison", nil); a.StatusCode != http.StatusServiceUnavailable {
		t.Errorf("dead letter 1,001: %d", a.StatusCode)
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

const userLimit = 100

// shop is a page in front of a shop in memory, which runs until the test ends.
type shop struct {
	t    testing.TB
	url  string
	page *web.Page
	demo *memory.Demo // whose trials and servers the page has
}

// newShop runs a shop; change may change the page's Config.
func newShop(t testing.TB, change ...func(*web.Config)) *shop {
	t.Helper()
	quiet := slog.New(slog.DiscardHandler)
	tracker := flow.New()
	parts, err := memory.Open(memory.Config{Logger: quiet, Flow: tracker})
	noError(t, err)
	api, err := httpapi.New(httpapi.Config{
		Shop:    booking.Shop{Hold: time.Minute, NewID: func() string { return uuid.Must(uuid.NewV7()).String() }},
		Backend: parts.Shop, Keys: parts.Keys, Limiter: parts.Limiter, UserLimit: userLimit, Logger: quiet,
	})
	noError(t, err)
	user, global := httpapi.Limits(userLimit, 0)
	cfg := web.Config{
		API: api, Flow: tracker, Backlog: parts.Demo.Backlog, Trials: parts.Demo, Limits: web.Limits{Limiter: parts.Limiter, User: user, Global: global},
	}
	for _, server := range parts.Demo.Servers() {
		cfg.Servers = append(cfg.Servers, server)
	}
	for _, c := range change {
		c(&cfg)
	}
	page, err := web.New(cfg)
	noError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	for _, run := range []func(context.Context) error{parts.Relay.Run, parts.Consumer.Run, parts.Sweeper.Run} {
		running.Go(func() {
			if err := run(ctx); err != nil {
				t.Error(err)
			}
		})
	}
	server := httptest.NewServer(page)
	t.Cleanup(func() {
		page.Close()
		server.Close()
		cancel()
		running.Wait()
	})
	return &shop{t: t, url: server.URL, page: page, demo: parts.Demo}
}

// answer is a response that was read.
type answer struct {
	*http.Response
	body string
}

func (s *shop) do(method, path, body string, header ...string) answer {
	s.t.Helper()
	req, err := http.NewRequestWithContext(s.t.Context(), method, s.url+path, strings.NewReader(body))
	noError(s.t, err)
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := http.DefaultClient.Do(req)
	noError(s.t, err)
	defer func() { _ = resp.Body.Close() }()
	text, err := io.ReadAll(resp.Body)
	noError(s.t, err)
	return answer{resp, string(text)}
}

// post sends a request of a buyer.
func (s *shop) post(path, body string) answer {
	s.t.Helper()
	return s.do(http.MethodPost, path, body, httpapi.UserHeader, "ada", idempotency.Header, string(idempotency.NewKey()), "Content-Type", "application/json")
}

// press sends the request of a button.
func (s *shop) press(path string, fields url.Values) answer {
	s.t.Helper()
	return s.do(http.MethodPost, path, fields.Encode(), "Content-Type", "application/x-www-form-urlencoded", "Sec-Fetch-Site", "same-origin")
}

// newEvent opens an event and returns its id.
func (s *shop) newEvent() string {
	s.t.Helper()
	a := s.post("/api/events", `{"name":"Concert","seats":50}`)
	var event struct{ ID string }
	if err := json.Unmarshal([]byte(a.body), &event); err != nil || a.StatusCode != http.StatusCreated {
		s.t.Fatalf("%d: %s", a.StatusCode, a.body)
	}
	return event.ID
}

func (s *shop) hold(event string) answer {
	s.t.Helper()
	return s.post("/api/reservations", `{"event_id":"`+event+`","quantity":1}`)
}

func noError(t testing.TB, errs ...error) {
	t.Helper()
	for _, err := range errs {
		if err != nil {
			t.Fatal(err)
		}
	}
}

// state is an event of the stream.
type state struct {
	Counts map[string]int
	Steps  []struct{ Stage, Text string }
	Limits []struct {
		Name      string
		Left, Max int
	}
	Backlog struct{ Outbox, Queue, Dead int }
	Trials  struct {
		Slow bool
		Off  map[string]bool
	}
}

// follow opens a stream for ada, and returns its events until the test or the stream ends.
func (s *shop) follow() <-chan state {
	s.t.Helper()
	req, err := http.NewRequestWithContext(s.t.Context(), http.MethodGet, s.url+"/shop/live?user=ada", nil)
	noError(s.t, err)
	resp, err := http.DefaultClient.Do(req)
	noError(s.t, err)
	if kind := resp.Header.Get("Content-Type"); kind != "text/event-stream" {
		text, _ := io.ReadAll(resp.Body)
		s.t.Fatalf("%d %s: %s", resp.StatusCode, kind, text)
	}
	states := make(chan state)
	go func() {
		defer close(states)
		defer func() { _ = resp.Body.Close() }()
		lines := bufio.NewScanner(resp.Body)
		for lines.Scan() {
			data, ok := strings.CutPrefix(lines.Text(), "data: ")
			if !ok {
				continue
			}
			var st state
			if err := json.Unmarshal([]byte(data), &st); err != nil {
				s.t.Error(err)
			}
			select {
			case states <- st:
			case <-s.t.Context().Done():
				return
			}
		}
	}()
	return states
}

// await reads the stream until ok returns true.
func (s *shop) await(what string, ok func(state) bool) {
	s.t.Helper()
	states := s.follow()
	var last state
	testenv.Eventually(s.t, func() error {
		if last = <-states; !ok(last) {
			return fmt.Errorf("%s: the stream sent %+v", what, last)
		}
		return nil
	})
}

func TestStream_showsAllStages(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	s.hold(s.newEvent())
	s.await("one reservation", func(st state) bool {
		return st.Counts["request"] == 2 && st.Counts["transaction"] == 2 && st.Counts["published"] == 1 &&
			st.Counts["processed"] == 1 && st.Counts["updated"] == 1 && st.Backlog.Outbox == 0 && st.Backlog.Queue == 0
	})
	s.await("steps and limits", func(st state) bool {
		return len(st.Steps) == 7 && st.Steps[0].Stage == "transaction" && st.Steps[1].Text == "POST /api/events: 201" &&
			len(st.Limits) == 1 && st.Limits[0].Left == userLimit-2 && st.Limits[0].Max == userLimit
	})
}

func TestStreamsAreBounded(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	for range 100 {
		<-s.follow()
	}
	if a := s.do(http.MethodGet, "/shop/live?user=ada", ""); a.StatusCode != http.StatusServiceUnavailable {
		t.Errorf("stream 101 is answered %d", a.StatusCode)
	}
	for _, user := range []string{"", "a+b", strings.Repeat("a", 65)} {
		if a := s.do(http.MethodGet, "/shop/live?user="+user, ""); a.StatusCode != http.StatusBadRequest {
			t.Errorf("user %q is answered %d", user, a.StatusCode)
		}
	}
}

// blind fails like unreachable servers.
type blind struct{ flow.Flow }

func (blind) Look(context.Context) (map[flow.Stage]int64, []flow.Step, error) {
	return nil, nil, errors.New("no answer")
}

// Peek fails for the second of two limits.
func (blind) Peek(_ context.Context, charges ...ratelimit.Charge) (ratelimit.Decision, error) {
	if charges[0].Key == "" {
		return ratelimit.Decision{}, errors.New("no answer")
	}
	return ratelimit.Decision{Allowed: true}, nil
}

// TestUnknownIsNull checks that unknown values are null, and that limits are not sent in part.
func TestUnknownIsNull(t *testing.T) {
	t.Parallel()
	s := newShop(t, func(cfg *web.Config) {
		cfg.Flow, cfg.Trials = blind{cfg.Flow}, nil
		cfg.Backlog = func(context.Context) (flow.Backlog, error) { return flow.Backlog{}, errors.New("no answer") }
		cfg.Limits = web.Limits{Limiter: blind{}, Global: ratelimit.Limit{Max: 1}}
	})
	resp, err := http.Get(s.url + "/shop/live?user=ada")
	noError(t, err)
	defer func() { _ = resp.Body.Close() }()
	const want = `data: {"counts":null,"steps":null,"limits":null,"backlog":{"outbox":null,"queue":null,"dead":null}}`
	lines := bufio.NewScanner(resp.Body)
	for lines.Scan() && !strings.HasPrefix(lines.Text(), "data: ") {
	}
	if lines.Text() != want {
		t.Errorf("the stream sent %s", lines.Text())
	}
}

// remote is a limiter that fails after its caller's context has ended.
type remote struct{ *ratelimit.Memory }

func (r remote) Peek(ctx context.Context, charges ...ratelimit.Charge) (ratelimit.Decision, error) {
	if err := ctx.Err(); err != nil {
		return ratelimit.Decision{}, err
	}
	return r.Memory.Peek(ctx, charges...)
}

// A stream may end while its state is read. It must not end with an event that reports unknown limits.
func TestStream_endsWithoutPartialEvent(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		memory, err := ratelimit.NewMemory(ratelimit.MemoryConfig{})
		noError(t, err)
		page, err := web.New(web.Config{
			API: http.NotFoundHandler(), Flow: flow.New(), Backlog: func(context.Context) (flow.Backlog, error) { return flow.Backlog{}, nil },
			Limits: web.Limits{Limiter: remote{memory}, User: ratelimit.Limit{Name: "user", Max: 10}},
		})
		noError(t, err)
		const streams = 20
		for range streams {
			w := httptest.NewRecorder()
			page.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/shop/live?user=ada", nil))
			if told := w.Body.String(); strings.Contains(told, `"limits":[]`) || strings.Count(told, `"left":10`) < 100 {
				t.Fatalf("the stream sent: %s", told[max(0, len(told)-500):])
			}
		}
	})
}
