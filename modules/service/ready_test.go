package service_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/modules/service"
)

// started runs a group with a part, whose Ready returns what state says, until the test ends.
func started(t *testing.T, g *service.Group) {
	t.Helper()
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() { defer close(ended); _ = g.Run(ctx) }()
	t.Cleanup(func() { stop(); <-ended })
	synctest.Wait()
}

type readyPart struct{ err *error }

func (readyPart) Run(ctx context.Context) error     { <-ctx.Done(); return nil }
func (p readyPart) Ready(ctx context.Context) error { return *p.err }

func probe(ctx context.Context, handler http.Handler) (int, string) {
	w := httptest.NewRecorder()
	handler.ServeHTTP(w, httptest.NewRequestWithContext(ctx, http.MethodGet, "/readyz", nil))
	return w.Code, w.Body.String()
}

// The answer follows parts and checks within a second. It names them and keeps their errors to itself.
func TestReady_followsPartsAndChecks(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var relay, server error
		g := &service.Group{Logger: quiet()}
		g.Last("relay", readyPart{&relay})
		g.Add("job", run(func(ctx context.Context) error { <-ctx.Done(); return nil }))
		handler := g.Ready(map[string]func(context.Context) error{
			"postgres": func(context.Context) error { return server },
			"broken": func(context.Context) error {
				if server != nil {
					panic("nil pool")
				}
				return nil
			},
		})
		if code, body := probe(t.Context(), handler); code != 503 || body != `{"status":"starting"}` {
			t.Errorf("before Run: %d %s", code, body)
		}
		started(t, g)
		for _, step := range []struct {
			relay, server error
			want          string
		}{
			{nil, nil, `{"status":"ready"}`},
			{errors.New("lease lost"), nil, `{"status":"not ready","waiting_for":["relay"]}`},
			{errors.New("lease lost"), errors.New("10.0.0.7: refused"), `{"status":"not ready","waiting_for":["broken","postgres","relay"]}`},
			{nil, nil, `{"status":"ready"}`},
		} {
			relay, server = step.relay, step.server
			time.Sleep(time.Second)
			if code, body := probe(t.Context(), handler); body != step.want || (code == 200) != (step.want == `{"status":"ready"}`) {
				t.Errorf("%d %s, want %s", code, body, step.want)
			}
		}
	})
}

// A check that hangs is named after 2 s, and no other.
func TestReady_oneHangs(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		g := &service.Group{Logger: quiet()}
		g.Add("job", run(func(ctx context.Context) error { <-ctx.Done(); return nil }))
		handler := g.Ready(map[string]func(context.Context) error{
			"hangs": func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() },
			"slow":  func(context.Context) error { time.Sleep(time.Second); return nil },
			"down":  func(context.Context) error { return errDown },
		})
		started(t, g)
		began := time.Now()
		if _, body := probe(t.Context(), handler); body != `{"status":"not ready","waiting_for":["down","hangs"]}` || time.Since(began) != 2*time.Second {
			t.Errorf("%s after %v", body, time.Since(began))
		}
	})
}

// Many probes, some of whose senders hang up, cost a server one question a second and the log one line.
func TestReady_isAskedSeldom(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var asked int
		var log bytes.Buffer
		g := &service.Group{Logger: slog.New(slog.NewTextHandler(&log, nil))}
		g.Add("job", run(func(ctx context.Context) error { <-ctx.Done(); return nil }))
		handler := g.Ready(map[string]func(context.Context) error{"server": func(ctx context.Context) error {
			asked++
			time.Sleep(time.Millisecond)
			return errors.Join(errDown, ctx.Err())
		}})
		started(t, g)
		gone, hangUp := context.WithCancel(t.Context())
		hangUp()
		for range 59 {
			var crowd sync.WaitGroup
			for i := range 10 {
				crowd.Go(func() {
					ctx := t.Context()
					if i%2 == 0 {
						ctx = gone
					}
					if code, _ := probe(ctx, handler); code != 503 {
						t.Errorf("answer is %d", code)
					}
				})
			}
			crowd.Wait()
			time.Sleep(time.Second)
		}
		if text := log.String(); asked != 59 || strings.Count(text, "not ready") != 1 || strings.Contains(text, "canceled") {
			t.Errorf("asked %d times in 59 seconds, want 59; log: %s", asked, text)
		}
	})
}
