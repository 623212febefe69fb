package web_test

import (
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/examples/reservation/internal/booking"
	"github.com/holdfast-go/holdfast/examples/reservation/internal/flow"
	"github.com/holdfast-go/holdfast/examples/reservation/internal/httpapi"
	"github.com/holdfast-go/holdfast/examples/reservation/internal/memory"
	"github.com/holdfast-go/holdfast/examples/reservation/internal/web"
	"github.com/holdfast-go/holdfast/idempotency"
)

const userLimit = 100

// shop is a page before a whole shop in memory that runs until the test ends.
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

// post sends what a buyer's page sends.
func (s *shop) post(path, body string) answer {
	s.t.Helper()
	return s.do(http.MethodPost, path, body, httpapi.UserHeader, "ada", idempotency.Header, string(idempotency.NewKey()), "Content-Type", "application/json")
}

// press sends what a button of the page sends.
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
