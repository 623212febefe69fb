package service_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	amqp "github.com/rabbitmq/amqp091-go"
	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/amqptest"
	"github.com/holdfast-go/holdfast/internal/testenv/pgtest"
	"github.com/holdfast-go/holdfast/internal/testenv/redistest"
	"github.com/holdfast-go/holdfast/modules/service"
	"github.com/holdfast-go/holdfast/outbox/outboxamqp"
)

// started runs a group until the test ends.
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

// The answer follows parts and checks within a second. It has their names, but not their errors.
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

// A check that hangs is not ready after 2 s, and delays no other.
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

// Many probes, some from senders that hang up, cost a server one request a second, and the log one line.
func TestReady_asksOncePerSecond(t *testing.T) {
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

var errDown = errors.New("connection refused")

// The steps succeed in order, each is repeated until it does, with pauses that grow.
func TestPrepare_triesUntilItSucceeds(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		d := newDiary()
		var log bytes.Buffer
		g := &service.Group{Logger: slog.New(slog.NewTextHandler(&log, nil))}
		after := func(up time.Duration, name string) func(context.Context) error {
			return func(context.Context) error {
				if time.Since(d.began) < up {
					d.note(name + " fails")
					return errDown
				}
				d.note(name)
				return nil
			}
		}
		if err := g.Prepare(t.Context(), "postgres", after(0, "1 ping"), after(6*time.Second, "2 migrate"), after(0, "3 tables")); err != nil {
			t.Error(err)
		}
		const want = `0s 1 ping
0s 2 migrate fails
100ms 2 migrate fails
300ms 2 migrate fails
700ms 2 migrate fails
1.5s 2 migrate fails
3.1s 2 migrate fails
5.1s 2 migrate fails
7.1s 2 migrate
7.1s 3 tables`
		if got := d.text(1); got != want {
			t.Errorf("got\n%s\nwant\n%s", got, want)
		}
		if text := log.String(); strings.Count(text, "\n") != 2 || !strings.Contains(text, "name=postgres") || !strings.Contains(text, "failures=7") {
			t.Errorf("log: %s", text)
		}
	})
}

// A minute of waiting costs seven lines, whether the server refuses connections or is silent. The error has the
// cause of the end and the last failure.
func TestPrepare_endsWithItsContext(t *testing.T) {
	t.Parallel()
	for name, step := range map[string]func(context.Context) error{
		"refused": func(context.Context) error { return errDown },
		"silent": func(ctx context.Context) error {
			ctx, cancel := context.WithTimeout(ctx, 15*time.Second)
			defer cancel()
			<-ctx.Done()
			return errors.Join(errDown, ctx.Err())
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				var log bytes.Buffer
				g := &service.Group{Logger: slog.New(slog.NewTextHandler(&log, nil))}
				began := time.Now()
				stop := errors.New("terminated")
				ctx, signal := context.WithCancelCause(t.Context())
				time.AfterFunc(61*time.Second, func() { signal(stop) })
				err := g.Prepare(ctx, "rabbitmq", step)
				if time.Since(began) != 61*time.Second || !errors.Is(err, errDown) || !errors.Is(err, stop) ||
					!strings.HasPrefix(err.Error(), "service: rabbitmq: gave up after 1m1s: ") {
					t.Errorf("after %v: %v", time.Since(began), err)
				}
				if text := log.String(); strings.Count(text, "\n") != 7 || !strings.Contains(text, "waited=1m0s") {
					t.Errorf("log: %s", text)
				}
			})
		})
	}
}

// A rejection ends the wait after 5 s, unless the server was down in between.
func TestPrepare_refusal(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		wrong := &pgconn.PgError{Code: "28P01", Message: "password authentication failed"}
		began := time.Now()
		g := &service.Group{Logger: quiet()}
		err := g.Prepare(t.Context(), "postgres", func(context.Context) error {
			if since := time.Since(began); since > 4*time.Second && since < 20*time.Second {
				return errDown
			}
			return wrong
		})
		if took := time.Since(began); !errors.Is(err, wrong) || !strings.HasPrefix(err.Error(), "service: postgres: refused: ") || took < 25*time.Second || took > 28*time.Second {
			t.Errorf("after %v: %v", took, err)
		}
	})
}

// The real errors of the servers for a wrong password, an unknown database and an unknown virtual host are
// rejections. A server that is down does not reject.
func TestPrepare_refusalsOfServers(t *testing.T) {
	t.Parallel()
	postgres := pgtest.URL(t)
	broker, cache := amqptest.New(t).URL, redistest.URL(t)
	connect := func(url string) error {
		conn, err := pgconn.Connect(t.Context(), url)
		if err == nil {
			err = conn.Close(t.Context())
		}
		return err
	}
	dial := func(url string) error {
		conn, err := outboxamqp.Dial(url, amqp.Config{})(t.Context())
		if err == nil {
			err = conn.Close()
		}
		return err
	}
	options, err := redis.ParseURL(cache)
	if err != nil {
		t.Fatal(err)
	}
	options.Username, options.Password = "nobody", "wrong"
	client := redis.NewClient(options)
	t.Cleanup(func() { _ = client.Close() })
	for name, tc := range map[string]struct {
		ask     func() error
		refused bool
	}{
		"unknown database":     {func() error { return connect(inPath(postgres, "nowhere")) }, true},
		"no Postgres":          {func() error { return connect("postgres://x@127.0.0.1:1/x") }, false},
		"unknown vhost":        {func() error { return dial(inPath(broker, "nowhere")) }, true},
		"wrong password":       {func() error { return dial(withUser(broker)) }, true},
		"no broker":            {func() error { return dial("amqp://127.0.0.1:1/") }, false},
		"broker's address":     {func() error { return dial("") }, true},
		"wrong Redis password": {func() error { return client.Ping(t.Context()).Err() }, true},
		"bad address":          {func() error { return dial("amqp://%zz/") }, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if name == "wrong password" {
				testenv.Nightly(t, "RabbitMQ answers after 3 s")
			}
			if err := tc.ask(); err == nil || service.Refusal(err) != tc.refused {
				t.Errorf("%v; want a refusal: %v", err, tc.refused)
			}
		})
	}
}

// inPath returns the address with another database or virtual host.
func inPath(address, name string) string {
	u, err := url.Parse(address)
	if err != nil {
		return err.Error()
	}
	u.Path = "/" + name
	return u.String()
}

// withUser returns the address with a wrong password.
func withUser(address string) string {
	u, err := url.Parse(address)
	if err != nil {
		return err.Error()
	}
	u.User = url.UserPassword("guest", "wrong")
	return u.String()
}
