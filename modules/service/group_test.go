package service_test

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/modules/service"
)

// TestMain runs a program instead of the tests if the binary has its name. TestSignals starts it by a link.
func TestMain(m *testing.M) {
	if filepath.Base(os.Args[0]) == "stuck" {
		stuckProgram()
	}
	os.Exit(testenv.Run(m))
}

// diary has the events of a test, with the time since its start.
type diary struct {
	began time.Time

	mu     sync.Mutex
	events []event
}

type event struct {
	at   time.Duration
	text string
}

func newDiary() *diary { return &diary{began: time.Now()} }

func (d *diary) note(text string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.events = append(d.events, event{time.Since(d.began), text})
}

// text has the events in lines, sorted by time and name. Times are cut to unit.
func (d *diary) text(unit time.Duration) string {
	d.mu.Lock()
	defer d.mu.Unlock()
	var lines []string
	for i := range d.events {
		d.events[i].at = d.events[i].at.Truncate(unit)
	}
	slices.SortStableFunc(d.events, func(a, b event) int { return cmp.Or(cmp.Compare(a.at, b.at), strings.Compare(a.text, b.text)) })
	for _, e := range d.events {
		lines = append(lines, fmt.Sprintf("%v %s", e.at, e.text))
	}
	return strings.Join(lines, "\n")
}

// run is a part made of a function.
type run func(ctx context.Context) error

func (r run) Run(ctx context.Context) error { return r(ctx) }

// drains returns a part whose end takes this time.
func (d *diary) drains(name string, takes time.Duration) run {
	return func(ctx context.Context) error {
		<-ctx.Done()
		d.note(name + " stops")
		time.Sleep(takes)
		d.note(name + " ended")
		return nil
	}
}

// pipes is a listener for bubbles: its connections are pipes.
type pipes struct {
	conns chan net.Conn
	done  chan struct{}
	once  sync.Once
}

func newPipes() *pipes { return &pipes{conns: make(chan net.Conn), done: make(chan struct{})} }

func (p *pipes) Accept() (net.Conn, error) {
	select {
	case conn := <-p.conns:
		return conn, nil
	case <-p.done:
		return nil, net.ErrClosed
	}
}

func (p *pipes) Close() error {
	p.once.Do(func() { close(p.done) })
	return nil
}

func (p *pipes) Addr() net.Addr { return &net.UnixAddr{Name: "pipes"} }

// get sends a request on a connection of its own and returns the status and the body.
func (p *pipes) get(ctx context.Context, path string) string {
	client := &http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(context.Context, string, string) (net.Conn, error) {
			here, there := net.Pipe()
			select {
			case p.conns <- there:
				return here, nil
			case <-p.done:
				return nil, errors.New("refused")
			}
		},
	}}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://service"+path, nil)
	if err != nil {
		return err.Error()
	}
	resp, err := client.Do(req)
	if err != nil {
		return "no answer"
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		return err.Error()
	}
	return fmt.Sprintf("%d %s", resp.StatusCode, body)
}

func quiet() *slog.Logger { return slog.New(slog.DiscardHandler) }

// Readiness fails first; after the delay the listener closes and the running request is answered; then consumer
// and sweeper stop together, and the relay last.
func TestRun_stopsInOrder(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		d, listener := newDiary(), newPipes()
		g := &service.Group{DrainDelay: 5 * time.Second, Logger: quiet()}
		mux := http.NewServeMux()
		mux.Handle("/readyz", g.Ready(nil))
		mux.HandleFunc("/slow", func(http.ResponseWriter, *http.Request) { time.Sleep(9 * time.Second) })
		g.Last("relay", d.drains("relay", time.Second)) // the order of these calls does not matter
		g.Add("billing", d.drains("billing", 4*time.Second))
		g.Add("sweeper", d.drains("sweeper", 2*time.Second))
		g.Serve(listener, &http.Server{Handler: mux})
		ctx, signal := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { ended <- g.Run(ctx) }()
		synctest.Wait()
		d.note("probe: " + listener.get(ctx, "/readyz"))
		time.Sleep(time.Second)
		go func() { d.note("slow: " + listener.get(t.Context(), "/slow")) }()
		synctest.Wait()
		signal()
		time.Sleep(time.Second)
		d.note("probe: " + listener.get(t.Context(), "/readyz"))
		time.Sleep(4 * time.Second)
		synctest.Wait()
		d.note("probe: " + listener.get(t.Context(), "/readyz"))
		if err := <-ended; err != nil {
			t.Error(err)
		}
		d.note("end")
		const want = `0s probe: 200 {"status":"ready"}
2s probe: 503 {"status":"stopping"}
6s probe: no answer
10s billing stops
10s slow: 200 
10s sweeper stops
12s sweeper ended
14s billing ended
14s relay stops
15s end
15s relay ended`
		// Shutdown looks at its connections every now and then, so only whole seconds are exact.
		if got := d.text(time.Second); got != want {
			t.Errorf("got\n%s\nwant\n%s", got, want)
		}
	})
}

// A part that ends for any reason ends all parts. The error names it.
func TestRun_endsWithAnyPart(t *testing.T) {
	t.Parallel()
	broken := errors.New("broken")
	for name, tc := range map[string]struct {
		end  run
		want string
	}{
		"error":  {func(context.Context) error { return broken }, "service: billing: broken"},
		"nil":    {func(context.Context) error { return nil }, "service: billing: ended without being stopped"},
		"panic":  {func(context.Context) error { panic("ouch") }, "service: billing: panic: ouch"},
		"goexit": {func(context.Context) error { runtime.Goexit(); return nil }, "service: billing: ended by runtime.Goexit"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				d := newDiary()
				var log bytes.Buffer
				g := &service.Group{Logger: slog.New(slog.NewTextHandler(&log, nil))}
				g.Serve(newPipes(), &http.Server{})
				g.Last("relay", d.drains("relay", time.Second))
				g.Add("billing", run(func(ctx context.Context) error {
					time.Sleep(time.Minute)
					return tc.end(ctx)
				}))
				err := g.Run(t.Context())
				if err == nil || err.Error() != tc.want {
					t.Errorf("error %v, want %s", err, tc.want)
				}
				if name == "error" && !errors.Is(err, broken) {
					t.Error("the error does not wrap the cause")
				}
				if got := d.text(1); got != "1m0s relay stops\n1m1s relay ended" {
					t.Errorf("the relay: %s", got)
				}
				if !strings.Contains(log.String(), "stopping") || !strings.Contains(log.String(), "billing") ||
					name == "panic" && !strings.Contains(log.String(), "group_test.go") {
					t.Errorf("the log lacks the cause: %s", log.String())
				}
			})
		})
	}
}

// An error during the drain is reported, too. The end of the context is no error.
func TestRun_errorsOfTheDrain(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		g := &service.Group{Logger: quiet()}
		g.Add("canceled", run(func(ctx context.Context) error { <-ctx.Done(); return fmt.Errorf("poll: %w", ctx.Err()) }))
		g.Last("late", run(func(ctx context.Context) error { <-ctx.Done(); return errors.New("not flushed") }))
		ctx, signal := context.WithTimeout(t.Context(), time.Second)
		defer signal()
		if err := g.Run(ctx); err == nil || err.Error() != "service: late: not flushed" {
			t.Errorf("error %v", err)
		}
	})
}

// A part that does not stop is named in the error, each stage has its own timeout, and a hanging request is cut off.
func TestRun_abandonsStuckParts(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		stuck := run(func(context.Context) error { <-release; return nil })
		d, listener := newDiary(), newPipes()
		g := &service.Group{StopTimeout: 20 * time.Second, Logger: quiet()}
		g.Serve(listener, &http.Server{Handler: http.HandlerFunc(func(http.ResponseWriter, *http.Request) { <-release })})
		g.Add("billing", stuck)
		g.Add("mails", stuck)
		g.Add("sweeper", d.drains("sweeper", time.Second))
		g.Last("relay", d.drains("relay", time.Second))
		ctx, signal := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { ended <- g.Run(ctx) }()
		go func() { d.note("request: " + listener.get(t.Context(), "/")) }()
		synctest.Wait()
		signal()
		const want = `service: http pipes: did not stop within 20s
service: billing: did not stop within 20s
service: mails: did not stop within 20s`
		if err := <-ended; err == nil || err.Error() != want {
			t.Errorf("error %v", err)
		}
		if got := d.text(1); got != "20s request: no answer\n20s sweeper stops\n21s sweeper ended\n40s relay stops\n41s relay ended" {
			t.Error(got)
		}
		close(release)
	})
}

// Requests are served during the setup of a part. The part is not ready, and does not run.
func TestAdd_setsUpBesideTheOthers(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		listener, d := newPipes(), newDiary()
		g := &service.Group{Logger: quiet()}
		mux := http.NewServeMux()
		mux.Handle("/readyz", g.Ready(nil))
		mux.HandleFunc("/", func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "served") })
		g.Serve(listener, &http.Server{Handler: mux})
		up := time.Now().Add(time.Hour)
		g.Add("billing", run(func(ctx context.Context) error { d.note("billing runs"); <-ctx.Done(); return nil }),
			func(context.Context) error {
				if time.Now().Before(up) {
					return errors.New("connection refused")
				}
				return nil
			})
		g.Last("relay", d.drains("relay", 0), func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }) // silent server
		ctx, signal := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { ended <- g.Run(ctx) }()
		time.Sleep(time.Minute)
		if got := listener.get(ctx, "/"); got != "200 served" {
			t.Error(got)
		}
		if got := listener.get(ctx, "/readyz"); got != `503 {"status":"not ready","waiting_for":["billing","relay"]}` {
			t.Error(got)
		}
		time.Sleep(time.Hour)
		if got := listener.get(ctx, "/readyz"); got != `503 {"status":"not ready","waiting_for":["relay"]}` {
			t.Error(got)
		}
		signal()
		if err := <-ended; err != nil { // a part that was never set up ends well
			t.Error(err)
		}
		if got := d.text(time.Minute); got != "1h0m0s billing runs" {
			t.Error(got)
		}
	})
}

func TestRun_refusesMistakes(t *testing.T) {
	t.Parallel()
	nothing := run(func(context.Context) error { t.Error("started"); return nil })
	g := &service.Group{DrainDelay: -1, StopTimeout: -time.Second}
	g.Add("", nothing)
	g.Add("relay", nothing)
	g.Last("relay", nothing)
	err := g.Run(t.Context())
	for _, want := range []string{"DrainDelay", "-1ns", "StopTimeout", "-1s", `""`, `"relay"`} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v does not contain %s", err, want)
		}
	}
	empty := &service.Group{}
	if err := empty.Run(t.Context()); err == nil || !strings.Contains(err.Error(), "no part") {
		t.Error(err)
	}
	twice := &service.Group{Logger: quiet()}
	twice.Add("part", run(func(ctx context.Context) error { <-ctx.Done(); return nil }))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := twice.Run(ctx); err != nil {
		t.Error(err)
	}
	if err := twice.Run(ctx); err == nil || !strings.Contains(err.Error(), "before") {
		t.Error(err)
	}
}

// stuckProgram is a service with a part that does not stop.
func stuckProgram() {
	g := &service.Group{StopTimeout: time.Hour}
	g.Add("stuck", run(func(ctx context.Context) error {
		fmt.Fprintln(os.Stdout, "running")
		<-ctx.Done()
		fmt.Fprintln(os.Stdout, "stopping")
		select {}
	}))
	fmt.Fprintln(os.Stdout, g.Run(service.Signals()))
	os.Exit(3)
}

// The first signal starts the shutdown. The second ends the process at once, although a part is stuck.
func TestSignals_secondEndsAtOnce(t *testing.T) {
	t.Parallel()
	for _, signal := range []syscall.Signal{syscall.SIGINT, syscall.SIGTERM} {
		self, err := os.Executable()
		link := filepath.Join(t.TempDir(), "stuck")
		if err := errors.Join(err, os.Symlink(self, link)); err != nil {
			t.Fatal(err)
		}
		cmd := exec.CommandContext(t.Context(), link)
		out, err := cmd.StdoutPipe()
		if err := errors.Join(err, cmd.Start()); err != nil {
			t.Fatal(err)
		}
		watchdog := time.AfterFunc(testenv.Patience, func() { _ = cmd.Process.Kill() }) // a hang: it fails below
		lines := bufio.NewScanner(out)
		for _, want := range []string{"running", "stopping"} {
			if !lines.Scan() || lines.Text() != want {
				t.Fatalf("printed %q, want %q", lines.Text(), want)
			}
			if err := cmd.Process.Signal(signal); err != nil {
				t.Fatal(err)
			}
		}
		err = cmd.Wait()
		watchdog.Stop()
		if status, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); !ok || !status.Signaled() || status.Signal() != signal {
			t.Errorf("after two %v: %v", signal, err)
		}
	}
}
