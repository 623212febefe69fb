package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/examples/reservation/internal/flow"
	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/amqptest"
	"github.com/holdfast-go/holdfast/modules/operator"
	"github.com/holdfast-go/holdfast/modules/operator/command"
	"github.com/holdfast-go/holdfast/modules/service"
	"github.com/holdfast-go/holdfast/outbox/driver"
)

// TestMain runs the program instead of the tests if the binary has the program's name. Tests start it by a link.
func TestMain(m *testing.M) {
	if filepath.Base(os.Args[0]) == "reservation" {
		main()
	}
	os.Exit(testenv.Run(m))
}

// nowhere is an environment whose servers do not exist.
func nowhere(name string) string {
	return map[string]string{
		"DATABASE_URL": "postgres://x@127.0.0.1:1/x", "REDIS_URL": "redis://127.0.0.1:1/0", "AMQP_URL": "amqp://127.0.0.1:1/",
		"NATS_URL": "nats://127.0.0.1:1",
	}[name]
}

// inProcess runs the program in this process. It sets the default logger, so its tests are not parallel.
func inProcess(t *testing.T, getenv func(string) string, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	defer slog.SetDefault(slog.Default())
	var out, errs bytes.Buffer
	code = run(t.Context(), args, getenv, &out, &errs)
	return code, out.String(), errs.String()
}

func TestUsage_mistakes(t *testing.T) {
	wrong := [][]string{{"-sweep=@every 1ns"}}
	for _, args := range []string{
		"-backend=memory -role=relay", "-role=api", "-backend=memory relay", "-backend=floppy", "-backend=services -role=boss", "-broker=kafka",
		"-drain=-1s", "-hold=x", "-hold=0s", "-hold=-1m", "-sweep=sometimes",
		"-user-limit=0", "-global-limit=-1", "-user-limit=1000000001", "-global-limit=1000000001", "-user-limit=9223372036854775807",
		"-port=1", "nonsense", "-addr=", "-addr=8080", "-addr=127.0.0.1:99999", "-backend=services -role=api -addr=",
		"-ops-addr=9090", "-backend=services -role=relay -ops-addr=127.0.0.1:0",
		"relay x", "relay --limit=0", "relay --limit=x", "relay --time-limit=-1s", "relay --time-limit=99999999999", "sweep --now",
		"-backend=containers sweep",
		"-trials -page=false", "-backend=services -trials -page=false",
		"-memory-limit=-1", "-memory-limit=M", "-memory-limit=1KM", "-memory-limit=99999999999G", "-time-limit=-1s",
		"-message-limit=-1", "-message-limit=1", "-backend=services -role=api -message-limit=1",
	} {
		wrong = append(wrong, strings.Fields(args))
	}
	for _, args := range wrong {
		code, out, errs := inProcess(t, nowhere, args...)
		if code != exitUsage || strings.Contains(errs, "_URL") || out != "" || strings.Count(errs, "\n") != 1 || !strings.HasPrefix(errs, "reservation: ") {
			t.Errorf("%q exits with %d, prints %q and %q; want 2 and one line", args, code, out, errs)
		}
	}
}

// Addresses of servers have no default: the program does nothing on servers that nobody has named.
func TestUsage_addresses(t *testing.T) {
	unset := func(string) string { return "" }
	for args, names := range map[string]string{
		"-backend=services": "DATABASE_URL REDIS_URL AMQP_URL", "-backend=services -role=relay": "DATABASE_URL REDIS_URL AMQP_URL",
		"-broker=redis relay": "DATABASE_URL REDIS_URL", "-broker=nats relay": "DATABASE_URL REDIS_URL NATS_URL", "setup": "DATABASE_URL REDIS_URL AMQP_URL",
	} {
		code, out, errs := inProcess(t, unset, strings.Fields(args)...)
		if code != exitUsage || out != "" || strings.Count(errs, "_URL is not set") != len(strings.Fields(names)) {
			t.Errorf("%s exits with %d: %s%s", args, code, out, errs)
		}
		for _, name := range strings.Fields(names) {
			if !strings.Contains(errs, name) {
				t.Errorf("%s does not name %s: %s", args, name, errs)
			}
		}
	}
	wrong := map[string]string{"DATABASE_URL": "mysql://root:secret@localhost/x", "AMQP_URL": "amqp://guest:secret@%zz/"}
	code, _, errs := inProcess(t, func(name string) string { return wrong[name] }, "-backend=services")
	if code != exitUsage || strings.Contains(errs, "secret") || !strings.Contains(errs, "DATABASE_URL") || !strings.Contains(errs, "AMQP_URL") {
		t.Errorf("wrong addresses: exit %d: %s", code, errs)
	}
	for args, part := range map[string]string{
		"-h": "reservation help", "help": "doctor", "relay -h": "--time-limit", "relay --help": "--time-limit", "help retry": "--class",
		"schema print": "CREATE TABLE", "completion bash": "reservation", "__complete sta": "status",
	} {
		if code, out, errs := inProcess(t, unset, strings.Fields(args)...); code != exitOK || !strings.Contains(out, part) {
			t.Errorf("%s exits with %d: %s%s", args, code, out, errs)
		}
	}
}

func TestConfig_defaults(t *testing.T) {
	t.Parallel()
	cfg, err := parseConfig(nil, nowhere, io.Discard)
	if err != nil || cfg.sweep != "*/30 * * * *" {
		t.Errorf("sweeps at %q, %v, want every half hour", cfg.sweep, err)
	}
	for args, want := range map[string]struct{ page, trials bool }{
		"":                                         {true, true},
		"-trials=false":                            {true, false},
		"-page=false":                              {false, false},
		"-backend=services":                        {false, false},
		"-backend=services -page":                  {true, false},
		"-backend=services -trials":                {true, true},
		"-backend=services -role=api -page":        {true, false},
		"-backend=services -role=relay -page":      {true, false},
		"-backend=services -role=consumer -trials": {true, true},
	} {
		cfg, err := parseConfig(strings.Fields(args), nowhere, io.Discard)
		if err != nil || cfg.page != want.page || cfg.trials != want.trials {
			t.Errorf("%q: page %v, trials %v, %v", args, cfg.page, cfg.trials, err)
		}
	}
	for text, want := range map[string]size{"0": 0, "1024": 1024, "3K": 3 << 10, "256M": 256 << 20, "2G": 2 << 30} {
		c, err := parseConfig([]string{"-memory-limit=" + text, "-user-limit=1000000000", "-global-limit=1000000000"}, nowhere, io.Discard)
		if err != nil || c.limits.memory != want {
			t.Errorf("-memory-limit=%s is %d, error %v", text, c.limits.memory, err)
		}
	}
}

func TestLimits_endTheProcess(t *testing.T) {
	t.Parallel()
	all := limits{time: time.Minute, messages: 10, memory: 1 << 20}
	for _, tc := range []struct {
		l        limits
		ran      time.Duration
		messages int64
		memory   size
		want     string
	}{
		{all, time.Minute - 1, 9, 1 << 20, ""},
		{all, time.Minute, 0, 0, "1m0s"},
		{all, 0, 11, 0, "11 messages"},
		{all, 0, 0, 1<<20 + 1, "1048577 bytes"},
		{limits{}, 1 << 60, 1 << 60, 1 << 60, ""},
	} {
		if got := tc.l.reached(tc.ran, tc.messages, tc.memory); tc.want == "" && got != "" || !strings.Contains(got, tc.want) {
			t.Errorf("%+v: %q", tc, got)
		}
	}
	if held := memoryInUse(); held < 1<<20 || held > 1<<40 {
		t.Errorf("the process holds %d bytes", held)
	}
	for name, tc := range map[string]struct {
		l    limits
		want time.Duration
	}{"time": {limits{time: 2 * time.Second}, 2 * time.Second}, "memory": {limits{memory: 1}, 0}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				began := time.Now()
				ctx, stop := tc.l.within(t.Context(), &handled{})
				defer stop()
				<-ctx.Done()
				if took := time.Since(began); took != tc.want {
					t.Errorf("ended after %v, want %v", took, tc.want)
				}
			})
		})
	}
	ctx, stop := (limits{}).within(t.Context(), &handled{})
	if ctx.Err() != nil {
		t.Error("ended without a limit")
	}
	if stop(); context.Cause(ctx) == nil {
		t.Error("not stopped")
	}
}

func TestTraces_wanted(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		variables   map[string]string
		want, wrong bool
	}{
		"nothing is set":                  {},
		"an endpoint":                     {map[string]string{"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}, true, false},
		"an endpoint of traces":           {map[string]string{"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:4318/v1/traces"}, true, false},
		"the default endpoint":            {map[string]string{"OTEL_TRACES_EXPORTER": "otlp"}, true, false},
		"none in spite of an endpoint":    {map[string]string{"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}, false, false},
		"an exporter that is not in here": {map[string]string{"OTEL_TRACES_EXPORTER": "zipkin"}, false, true},
	} {
		got, err := tracesWanted(func(name string) string { return tc.variables[name] })
		if got != tc.want || (err != nil) != tc.wrong {
			t.Errorf("%s: wanted is %v (%v), want %v", name, got, err, tc.want)
		}
	}
}

// A page somewhere else cannot slow down consumers that run without -trials.
func TestTrials_needTheFlag(t *testing.T) {
	t.Parallel()
	for _, flag := range []string{"-page", "-trials"} {
		cfg, err := parseConfig([]string{"-backend=services", flag}, nowhere, io.Discard)
		noError(t, err)
		s, err := newServers(cfg)
		noError(t, err)
		if slow := newParts(cfg, s).handled.slow; (slow != nil) != cfg.trials {
			t.Errorf("%s: consumers may be slowed down: %v", flag, slow != nil)
		}
		s.farewell = nil // no message was sent
		s.close()
	}
}

// A role is not ready without the servers that it needs, and ready without the others.
func TestChecks_perRole(t *testing.T) {
	t.Parallel()
	for role, want := range map[string]string{
		roleAll: "postgres,postgres of workers,redis", roleAPI: "postgres,redis",
		roleRelay: "postgres of workers", roleConsumer: "postgres of workers", roleSweeper: "postgres of workers",
	} {
		cfg, err := parseConfig([]string{"-backend=services", "-role=" + role}, nowhere, io.Discard)
		noError(t, err)
		s, err := newServers(cfg)
		noError(t, err)
		if got := strings.Join(slices.Sorted(maps.Keys(s.checks(role))), ","); got != want {
			t.Errorf("%s asks %s, want %s", role, got, want)
		}
		s.close()
	}
}

func noError(t testing.TB, errs ...error) {
	t.Helper()
	for _, err := range errs {
		if err != nil {
			t.Fatal(err)
		}
	}
}

// dialAny skips nodes that are down, wherever it starts.
func TestDialAny(t *testing.T) {
	t.Parallel()
	dial := dialAny([]string{"amqp://127.0.0.1:1/", amqptest.New(t).URL}, amqp.Config{})
	for range 20 {
		conn, err := dial(t.Context())
		noError(t, err)
		noError(t, conn.Close())
	}
	if _, err := dialAny([]string{"amqp://127.0.0.1:1/", "amqp://127.0.0.1:2/"}, amqp.Config{})(t.Context()); err == nil {
		t.Error("nodes that are gone are reached")
	}
}

func TestPartOf(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
	defer cancel()
	part, cancelPart := partOf(ctx, 3)
	defer cancelPart()
	if end, ok := part.Deadline(); !ok || time.Until(end) > 20*time.Minute || time.Until(end) < 10*time.Minute {
		t.Errorf("a third of an hour ends at %v", end)
	}
}

func TestNewRedis(t *testing.T) {
	t.Parallel()
	one, err := newRedis("redis://127.0.0.1:1/2")
	if c, ok := one.(*redis.Client); err != nil || !ok || c.Options().DB != 2 || c.Close() != nil {
		t.Errorf("one server: %T, %v", one, err)
	}
	many, err := newRedis("redis://127.0.0.1:1?addr=127.0.0.1:2&addr=127.0.0.1:3")
	noError(t, err)
	c, ok := many.(*redis.ClusterClient)
	if !ok {
		t.Fatalf("three nodes: %T", many)
	}
	slices.Sort(c.Options().Addrs)
	if got := strings.Join(c.Options().Addrs, " "); got != "127.0.0.1:1 127.0.0.1:2 127.0.0.1:3" || !c.Options().ContextTimeoutEnabled || c.Close() != nil {
		t.Errorf("three nodes: %s", got)
	}
}

func TestAddressesOfBrokers(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		broker, variable, addresses string
		fine                        bool
	}{
		{brokerRabbitMQ, "AMQP_URL", "amqp://a/", true},
		{brokerRabbitMQ, "AMQP_URL", "amqp://a/,amqps://b/", true},
		{brokerRabbitMQ, "AMQP_URL", "amqp://a/,http://b/", false},
		{brokerRabbitMQ, "AMQP_URL", "amqp://a/,", false},
		{brokerNATS, "NATS_URL", "nats://a:4222,tls://b", true},
		{brokerNATS, "NATS_URL", "nats://a,amqp://b", false},
		{brokerRedis, "NATS_URL", "", true},
	} {
		getenv := func(name string) string {
			if name == tc.variable {
				return tc.addresses
			}
			return nowhere(name)
		}
		if _, err := parseConfig([]string{"-backend=services", "-broker=" + tc.broker}, getenv, io.Discard); (err == nil) != tc.fine {
			t.Errorf("%s: %v", tc.addresses, err)
		}
	}
}

// In memory everybody may use the operator's page. On servers it needs the password, and does not exist
// without one.
func TestOperatorPage(t *testing.T) {
	t.Parallel()
	next := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { http.Error(w, "next", http.StatusTeapot) })
	for name, tc := range map[string]struct {
		cfg            config
		path, password string
		code           int
		part           string
	}{
		"memory":         {config{backend: backendMemory}, "/operator/", "", 200, "visitor"},
		"a view":         {config{backend: backendMemory}, "/operator/groups", "", 200, "visitor"},
		"no slash":       {config{backend: backendMemory}, "/operator", "", 307, ""},
		"beside it":      {config{backend: backendMemory}, "/operators", "", 418, "next"},
		"elsewhere":      {config{backend: backendMemory}, "//api", "", 418, "next"},
		"no password":    {config{backend: backendServices}, "/operator/", "x", 418, "next"},
		"who":            {config{backend: backendServices, operatorPassword: "x"}, "/operator/", "", 401, "password required"},
		"wrong password": {config{backend: backendServices, operatorPassword: "x"}, "/operator/", "y", 403, "may not"},
		"right password": {config{backend: backendServices, operatorPassword: "x"}, "/operator/", "x", 200, "ada"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			parts := tc.cfg
			parts.backend, parts.userLimit, parts.globalLimit = backendMemory, 10, 1000
			b, err := open(t.Context(), parts)
			noError(t, err)
			f := &front{page: newPage(tc.cfg, b.operator)}
			r := httptest.NewRequest(http.MethodGet, "http://shop"+tc.path, nil)
			if tc.password != "" {
				r.SetBasicAuth("ada", tc.password)
			}
			w := httptest.NewRecorder()
			f.withPage(tc.cfg, next).ServeHTTP(w, r)
			if w.Code != tc.code || !strings.Contains(w.Body.String(), tc.part) {
				t.Errorf("%d: %s", w.Code, w.Body)
			}
		})
	}
}

// pipes is a listener with connections in memory, for fake time.
type pipes struct {
	conns  chan net.Conn
	closed chan struct{}
	close  func()
}

func listenOnPipes() *pipes {
	closed := make(chan struct{})
	return &pipes{make(chan net.Conn, 1), closed, sync.OnceFunc(func() { close(closed) })}
}

func (p *pipes) Accept() (net.Conn, error) {
	select {
	case conn := <-p.conns:
		return conn, nil
	case <-p.closed:
		return nil, net.ErrClosed
	}
}

func (p *pipes) Close() error {
	p.close()
	return nil
}

func (p *pipes) Addr() net.Addr { return &net.TCPAddr{} }

// TestClientsThatDoNotReadOrWrite checks that each of these clients loses its connection after some minutes.
func TestClientsThatDoNotReadOrWrite(t *testing.T) {
	t.Parallel()
	for name, sends := range map[string]string{
		"reads nothing":      "GET / HTTP/1.1\r\nHost: shop\r\n\r\n",
		"sends half a head":  "GET / HTTP/1.1\r\nHo",
		"sends half a body":  "POST / HTTP/1.1\r\nHost: shop\r\nContent-Length: 10\r\n\r\n12345",
		"sends nothing else": "",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				handler := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
					if _, err := io.ReadAll(r.Body); err == nil {
						_, _ = w.Write(make([]byte, 1<<20))
					}
				})
				client, conn := net.Pipe()
				listener := listenOnPipes()
				listener.conns <- conn
				ctx, cancel := context.WithCancel(t.Context())
				ended := make(chan error)
				group := &service.Group{}
				group.Serve(listener, newServer(handler))
				go func() { ended <- group.Run(ctx) }()
				if _, err := fmt.Fprint(client, sends); err != nil {
					t.Fatal(err)
				}
				time.Sleep(4 * time.Minute)
				synctest.Wait()
				// A pipe has a deadline for as long as its other end is open.
				if err := client.SetDeadline(time.Time{}); !errors.Is(err, io.ErrClosedPipe) {
					t.Errorf("after four minutes the connection is still open: %v", err)
				}
				_ = client.Close()
				cancel()
				if err := <-ended; err != nil {
					t.Error(err)
				}
			})
		})
	}
}

// stuck is a service that ignores its context until a test ends.
type stuck struct{ end chan struct{} }

func (s stuck) Run(context.Context) error   { <-s.end; return nil }
func (s stuck) Ready(context.Context) error { return nil }

// A signal ends a process whose servers are silent: running requests, consumer and sweeper, and the relay have
// stopTimeout each.
func TestGroup_endsWithStuckParts(t *testing.T) {
	t.Parallel()
	for name, requests := range map[string]int{"a request in flight": 1, "no request": 0} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				part := stuck{make(chan struct{})}
				listener := listenOnPipes()
				client, conn := net.Pipe()
				listener.conns <- conn
				group := newGroup(config{role: roleAll}, part, part, part)
				group.Serve(listener, newServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { <-part.end })))
				ctx, signal := context.WithCancel(t.Context())
				ended := make(chan error)
				go func() { ended <- group.Run(ctx) }()
				if requests > 0 {
					if _, err := fmt.Fprint(client, "GET / HTTP/1.1\r\nHost: shop\r\n\r\n"); err != nil {
						t.Fatal(err)
					}
				} else {
					_ = client.Close()
				}
				synctest.Wait()
				began := time.Now()
				signal()
				err := <-ended
				if took, want := time.Since(began), time.Duration(requests+2)*stopTimeout; err == nil || took != want {
					t.Errorf("ended after %v with %v, want %v and the names of the parts", took, err, want)
				}
				for _, name := range []string{roleSweeper, roleConsumer, roleRelay} {
					if !strings.Contains(fmt.Sprint(err), name) {
						t.Errorf("%v does not name the %s", err, name)
					}
				}
				close(part.end)
				_ = client.Close()
			})
		})
	}
}

// TestBacklog_unknownCounts checks that a count is unknown before its server has answered, and long after.
func TestBacklog_unknownCounts(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var noOutbox, noQueue error
		b := &backlog{
			outbox: func(context.Context) (driver.Depth, error) {
				return driver.Depth{Ready: 1, Parked: 2, Dead: 3}, noOutbox
			},
			queue: func(context.Context) (inbox.Stats, error) {
				return inbox.Stats{Waiting: 4, Retrying: 5, Dead: map[string]int{"validation": 6}}, noQueue
			},
			inHand: func() int64 { return 7 },
		}
		ctx, stop := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { ended <- b.Run(ctx) }()
		// wants looks once a second, as a viewer does, and checks the last look.
		wants := func(when string, seconds int, want flow.Backlog) {
			t.Helper()
			var got flow.Backlog
			for range seconds {
				_, _ = b.Look(ctx) // it does not fail
				time.Sleep(time.Second)
				synctest.Wait()
				got, _ = b.Look(ctx)
			}
			if !reflect.DeepEqual(got, want) {
				t.Errorf("%s: %+v", when, got)
			}
		}
		outage := errors.New("no answer")
		all := flow.Backlog{Outbox: new(3), Queue: new(16), Dead: new(9)}

		if got, err := b.Look(ctx); err != nil || got != (flow.Backlog{}) {
			t.Errorf("at first: %+v, %v", got, err)
		}
		wants("both answer", 1, all)
		noOutbox = outage
		wants("the outbox is away for a moment", 2, all)
		wants("the outbox is away", 5, flow.Backlog{Queue: new(16)})
		noOutbox, noQueue = nil, outage
		wants("the queue is away", 7, flow.Backlog{Outbox: new(3)})
		noQueue = nil
		wants("both are back", 1, all)
		time.Sleep(time.Minute)
		if got, err := b.Look(ctx); err != nil || got != (flow.Backlog{}) {
			t.Errorf("nobody has looked for a minute: %+v, %v", got, err)
		}
		stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

// deployed matches the program's arguments: behind its name in a crontab, a unit or a configuration, and
// as a list in a manifest or an image.
var (
	deployed = regexp.MustCompile(`(?m)^[^#;\n][^#\n]*[ /=]reservation((?: [-a-z][^\n"]*)?)"?$`)
	listed   = regexp.MustCompile(`(?:args: |CMD )(\[[^\]]*\])`)
)

func read(t *testing.T, path ...string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(path...))
	noError(t, err)
	return string(text)
}

// The environment file of a deployed shop sets only variables that the program reads.
func TestDeployedEnvironment(t *testing.T) {
	t.Parallel()
	text := read(t, "deploy/reservation.env")
	given := map[string]string{}
	for _, match := range regexp.MustCompile(`(?m)^([A-Z_]+)='([^']*)'$`).FindAllStringSubmatch(text, -1) {
		given[match[1]] = match[2]
	}
	read := map[string]bool{}
	_, err := parseConfig([]string{"-backend=services"}, func(name string) string {
		read[name] = true
		return given[name]
	}, io.Discard)
	if err != nil || len(given) != 3 {
		t.Errorf("%d variables: %v", len(given), err)
	}
	for name := range given {
		if !read[name] {
			t.Errorf("the program does not read %s", name)
		}
	}
}

// The commands of crontab and supervisord get the addresses from the file, in an environment without them, and fail
// without the file. A stub replaces the program: TestDeployedFlags checks the arguments.
func TestDeployedCommands_environment(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	stub, file := filepath.Join(dir, "reservation"), filepath.Join(dir, "reservation.env")
	err := os.WriteFile(stub, []byte("#!/bin/sh\necho \"$DATABASE_URL $REDIS_URL $AMQP_URL $*\"\n"), 0o700)
	noError(t, errors.Join(err, os.WriteFile(file, []byte("DATABASE_URL='a b'\nREDIS_URL='c$d'\nAMQP_URL='e'\n"), 0o600)))
	commands, env := []string{}, []string{"HOME=/", "LOGNAME=shop"} // as cron sets them
	for name, pattern := range map[string]string{"crontab": `(?m)^(?:[^#\s]\S*\s+){5}shop\s+([^%\n]+)$`, "supervisor.conf": `(?m)^command=/bin/sh -c "([^"]*)"$`} {
		text := read(t, "deploy", name)
		here := strings.NewReplacer("/usr/local/bin", dir, "/etc/", dir+"/").Replace(text)
		for _, found := range regexp.MustCompile(pattern).FindAllStringSubmatch(here, -1) {
			commands = append(commands, found[1])
		}
		env = append(env, regexp.MustCompile(`(?m)^[A-Z_]+=.+$`).FindAllString(here, -1)...)
	}
	if len(commands) != 6 {
		t.Errorf("%d commands: %q", len(commands), commands)
	}
	run := func(command string) (string, error) {
		cmd := exec.CommandContext(t.Context(), "/bin/sh", "-c", command)
		cmd.Env = env
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
	for _, command := range commands {
		if out, err := run(command); err != nil || !strings.HasPrefix(out, "a b c$d e ") {
			t.Errorf("%s: %v, %s", command, err, out)
		}
	}
	noError(t, os.Remove(file))
	for _, command := range commands {
		if out, err := run(command); err == nil || !strings.Contains(out, "reservation.env") {
			t.Errorf("%s without the file: %v, %s", command, err, out)
		}
	}
}

// TestDeployedUser checks that supervisord, which is root, runs no program as root: the shell of each runs a file.
func TestDeployedUser(t *testing.T) {
	t.Parallel()
	text := read(t, "deploy/supervisor.conf")
	programs := strings.Split(text, "[program:")[1:]
	if len(programs) != 3 {
		t.Errorf("%d programs", len(programs))
	}
	for _, program := range programs {
		if name, options, _ := strings.Cut(program, "]\n"); !strings.Contains(options, "\nuser=shop\n") {
			t.Errorf("%s has no user", name)
		}
	}
}

// The program accepts the arguments in the files of deploy.
func TestDeployedFlags(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob("deploy/*")
	noError(t, err)
	runs := map[string]int{}
	for _, file := range files {
		text := read(t, file)
		var all [][]string
		for _, match := range deployed.FindAllStringSubmatch(text, -1) {
			all = append(all, strings.Fields(match[1]))
		}
		for _, match := range listed.FindAllStringSubmatch(text, -1) {
			var args []string
			if err := json.Unmarshal([]byte(match[1]), &args); err != nil {
				t.Errorf("%s: %s: %v", file, match[1], err)
			}
			all = append(all, args)
		}
		for _, args := range all {
			if len(args) > 0 {
				runs[filepath.Base(file)]++
				checkArgs(t, file, args)
			}
		}
	}
	for file, want := range map[string]int{"crontab": 3, "reservation@.service": 2, "supervisor.conf": 3, "Dockerfile": 1, "kubernetes.yaml": 5} {
		if runs[file] != want {
			t.Errorf("%s runs the program %d times, want %d", file, runs[file], want)
		}
	}
}

func checkArgs(t *testing.T, file string, args []string) {
	t.Helper()
	for i := range args {
		args[i] = strings.ReplaceAll(args[i], "=%i", "=relay") // systemd's instance
	}
	cfg, err := parseConfig(args, nowhere, io.Discard)
	if err != nil {
		t.Errorf("%s: %q: %v", file, args, err)
		return
	}
	if len(cfg.command) == 0 {
		return
	}
	root, err := command.New(operator.Config{})
	noError(t, err)
	cmd, rest, err := root.Find(cfg.command)
	if err == nil {
		err = cmd.ParseFlags(rest)
	}
	if err != nil {
		t.Errorf("%s: %q: %v", file, args, err)
	}
}

// compose.env has the addresses of compose.yaml.
func TestComposedEnvironment(t *testing.T) {
	t.Parallel()
	text := read(t, "compose.env")
	composed := read(t, "../../compose.yaml")
	given := map[string]string{}
	for _, match := range regexp.MustCompile(`(?m)^export ([A-Z_]+)='([^']*)'$`).FindAllStringSubmatch(text, -1) {
		given[match[1]] = match[2]
		u, err := url.Parse(match[2])
		if err != nil || !strings.Contains(composed, `"`+u.Host+":"+u.Port()+`"`) {
			t.Errorf("%s: compose.yaml has no %s, %v", match[1], u, err)
		}
	}
	if _, err := parseConfig([]string{"-backend=services"}, func(name string) string { return given[name] }, io.Discard); err != nil {
		t.Error(err)
	}
}
