package web_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/holdfast-go/holdfast/examples/reservation/internal/flow"
	"github.com/holdfast-go/holdfast/examples/reservation/internal/web"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/ratelimit"
)

// state is what the stream tells.
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

// follow begins a stream for ada, and returns its events until the test or the stream ends.
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

// await reads the stream until it tells what is wanted.
func (s *shop) await(what string, ok func(state) bool) {
	s.t.Helper()
	states := s.follow()
	var last state
	testenv.Eventually(s.t, func() error {
		if last = <-states; !ok(last) {
			return fmt.Errorf("%s: the stream tells %+v", what, last)
		}
		return nil
	})
}

func TestStreamTellsTheWayOfARequest(t *testing.T) {
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

// blind stands for servers that tell nothing.
type blind struct{ flow.Flow }

func (blind) Look(context.Context) (map[flow.Stage]int64, []flow.Step, error) {
	return nil, nil, errors.New("no answer")
}

// Peek tells the first of two limits.
func (blind) Peek(_ context.Context, charges ...ratelimit.Charge) (ratelimit.Decision, error) {
	if charges[0].Key == "" {
		return ratelimit.Decision{}, errors.New("no answer")
	}
	return ratelimit.Decision{Allowed: true}, nil
}

// TestUnknownIsNull wants null of what is not known, which the page shows as such, and no part of the limits.
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
		t.Errorf("the stream tells %s", lines.Text())
	}
}

// remote is a limiter that cannot be asked once its caller has given up.
type remote struct{ *ratelimit.Memory }

func (r remote) Peek(ctx context.Context, charges ...ratelimit.Charge) (ratelimit.Decision, error) {
	if err := ctx.Err(); err != nil {
		return ratelimit.Decision{}, err
	}
	return r.Memory.Peek(ctx, charges...)
}

// A stream ends when it is time for another look, and which of the two comes first is chance. No stream ends by telling
// that the limits are unknown.
func TestEndOfStreamTellsNothing(t *testing.T) {
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
				t.Fatalf("the stream tells: %s", told[max(0, len(told)-500):])
			}
		}
	})
}
