package main_test

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
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
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/internal/breaker"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/amqptest"
	"github.com/holdfast-go/holdfast/internal/testenv/pgtest"
	"github.com/holdfast-go/holdfast/internal/testenv/redistest"
)

// shopBinary returns the path of the program: this test binary by another name, see TestMain.
func shopBinary(t testing.TB) string {
	t.Helper()
	self, err := os.Executable()
	path := filepath.Join(t.TempDir(), "reservation")
	noError(t, errors.Join(err, os.Symlink(self, path)))
	return path
}

// services are one test's own parts of the shared servers.
type services struct{ databaseURL, redisURL, amqpURL, natsURL string }

// newServices returns the services of a shop with these flags. NATS is the test's own server, because the shop's streams
// have the same names everywhere.
func newServices(t testing.TB, flags ...string) services {
	t.Helper()
	s := services{databaseURL: pgtest.URL(t), redisURL: redistest.URL(t)}
	if slices.Contains(flags, onNATS) {
		s.natsURL = testenv.Private(t, testenv.NATS).URL()
	} else {
		s.amqpURL = amqptest.New(t).URL
	}
	return s
}

// The flags for brokers other than RabbitMQ.
const (
	onRedis = "-broker=redis"
	onNATS  = "-broker=nats"
)

// brokers runs a test on each broker: on RabbitMQ and those in always, and on the others at night. flags choose the broker.
func brokers(t *testing.T, test func(t *testing.T, flags ...string), always ...string) {
	t.Parallel()
	for name, flags := range map[string][]string{"RabbitMQ": nil, "Redis Streams": {onRedis}, "NATS": {onNATS}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if flags != nil && !slices.Contains(always, flags[0]) {
				testenv.Nightly(t, "the shop on its other brokers")
			}
			test(t, flags...)
		})
	}
}

func (s services) env() []string {
	return append(os.Environ(), "DATABASE_URL="+s.databaseURL, "REDIS_URL="+s.redisURL, "AMQP_URL="+s.amqpURL, "NATS_URL="+s.natsURL)
}

// process is a running shop.
type process struct {
	t      testing.TB
	cmd    *exec.Cmd
	url    string
	stdout *buffer
	stderr *buffer
	ended  chan struct{} // closed when waited for
	err    error         // of Wait
}

// start runs the shop on a free port until the test ends, and waits until it listens.
func start(t testing.TB, env []string, args ...string) *process {
	t.Helper()
	p, listening := launch(t, env, args...)
	select {
	case p.url = <-listening:
	case <-p.ended:
		t.Fatalf("%v ended before it listened: %v\n%s", args, p.err, p.stderr)
	case <-time.After(testenv.Patience):
		t.Fatalf("%v does not listen\n%s", args, p.stderr)
	}
	return p
}

// launch is start without the wait.
func launch(t testing.TB, env []string, args ...string) (*process, <-chan string) {
	t.Helper()
	p := &process{t: t, stdout: &buffer{}, stderr: &buffer{}, ended: make(chan struct{})}
	p.cmd = exec.Command(shopBinary(t), append([]string{"-addr=127.0.0.1:0"}, args...)...)
	p.cmd.Env, p.cmd.Stderr = env, p.stderr
	stdout, err := p.cmd.StdoutPipe()
	noError(t, err)
	dieWithTests(p.cmd)
	started, listening := make(chan error, 1), make(chan string, 1)
	go func() {
		runtime.LockOSThread() // the shop dies with this thread
		defer runtime.UnlockOSThread()
		err := p.cmd.Start()
		started <- err
		if err != nil {
			return
		}
		defer close(p.ended)
		lines := bufio.NewScanner(stdout)
		for lines.Scan() {
			fmt.Fprintln(p.stdout, lines.Text())
			if _, after, ok := strings.Cut(lines.Text(), "listening on "); ok {
				url, _, _ := strings.Cut(after, " ")
				listening <- url
			}
		}
		p.err = p.cmd.Wait()
	}()
	noError(t, <-started)
	t.Cleanup(func() {
		p.kill()
		if t.Failed() {
			t.Logf("%s printed:\n%s", strings.Join(args, " "), p.stderr)
		}
	})
	return p, listening
}

// dieWithTests ends cmd when these tests end for any reason. A locked thread must start cmd and wait for it.
func dieWithTests(cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{}
	testenv.DieWithParent(cmd.SysProcAttr)
}

// kill ends the process like a power cut.
func (p *process) kill() {
	_ = p.cmd.Process.Kill() // it may have ended
	<-p.ended
}

// stop ends the process by a signal. The exit code must be 0.
func (p *process) stop() {
	p.t.Helper()
	noError(p.t, p.cmd.Process.Signal(syscall.SIGTERM))
	select {
	case <-p.ended:
	case <-time.After(testenv.Patience):
		p.t.Fatalf("still there after SIGTERM\n%s", p.stderr)
	}
	if p.err != nil {
		p.t.Errorf("after SIGTERM: %v\n%s", p.err, p.stderr)
	}
}

// command runs the program to its end, and returns the exit code and the output.
func command(t testing.TB, env []string, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	var out, errs bytes.Buffer
	cmd := exec.CommandContext(t.Context(), shopBinary(t), args...)
	cmd.Env, cmd.Stdout, cmd.Stderr = env, &out, &errs
	dieWithTests(cmd)
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	err := cmd.Run()
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		return exit.ExitCode(), out.String(), errs.String()
	}
	noError(t, err)
	return 0, out.String(), errs.String()
}

// late are texts that doctor may print if a busy server answers after doctor's timeout.
var late = []string{
	context.DeadlineExceeded.Error(), os.ErrDeadlineExceeded.Error(), breaker.ErrDown.Error(), "notifications do not arrive",
}

// healthy runs doctor, which may only find settings that the owner of a shared server must change. It runs doctor again
// if an answer or a notification was late; anything else fails at once.
func healthy(t testing.TB, env []string, flags ...string) {
	t.Helper()
	var code int
	var out, errs string
	testenv.Eventually(t, func() error {
		code, out, errs = command(t, env, slices.Concat(flags, []string{"doctor"})...)
		if slices.ContainsFunc(late, func(text string) bool { return strings.Contains(out+errs, text) }) {
			return errors.New(out + errs)
		}
		return nil
	})
	onlyLocks := strings.Contains(out, "findings: 1;") && strings.Contains(out, "max_pred_locks_per_transaction")
	if code != 0 && (!onlyLocks || errs != "") {
		t.Errorf("doctor exits with %d: %s%s", code, out, errs)
	}
}

// buffer is a bytes.Buffer for a writer and a reader at the same time.
type buffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

var _ io.Writer = (*buffer)(nil)

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

// pgxScan queries the test's schema for one row.
func pgxScan(ctx context.Context, s services, target any, sql string, args ...any) error {
	conn, err := pgx.Connect(ctx, s.databaseURL)
	if err != nil {
		return err
	}
	defer conn.Close(ctx)
	return conn.QueryRow(ctx, sql, args...).Scan(target)
}

// hold runs a statement and keeps its locks until release is called.
func hold(t *testing.T, s services, sql string, args ...any) (holder *pgx.Conn, release func()) {
	t.Helper()
	ctx := t.Context()
	conn, err := pgx.Connect(ctx, s.databaseURL)
	noError(t, err)
	t.Cleanup(func() { _ = conn.Close(context.WithoutCancel(ctx)) })
	tx, err := conn.Begin(ctx)
	noError(t, err)
	if _, err := tx.Exec(ctx, sql, args...); err != nil {
		t.Fatal(err)
	}
	return conn, func() {
		t.Helper()
		noError(t, tx.Rollback(ctx))
	}
}

// awaitBlocked waits until n sessions wait for a lock of holder.
func awaitBlocked(t *testing.T, s services, holder *pgx.Conn, n int) {
	t.Helper()
	testenv.Eventually(t, func() error {
		var waiting int
		err := pgxScan(t.Context(), s, &waiting,
			"select count(*) from pg_stat_activity where $1::integer = any(pg_blocking_pids(pid))", holder.PgConn().PID())
		if err == nil && waiting < n {
			err = fmt.Errorf("%d wait for the lock, want %d", waiting, n)
		}
		return err
	})
}

// awaitReady waits until a process is ready.
func awaitReady(t *testing.T, url string) {
	t.Helper()
	c := newClient(t, url)
	testenv.Eventually(t, func() error {
		r, err := c.tryGet("/readyz")
		if err == nil && r.status != http.StatusOK {
			err = fmt.Errorf("%s answers %d: %s", url, r.status, r.body)
		}
		return err
	})
}

func noError(t testing.TB, errs ...error) {
	t.Helper()
	for _, err := range errs {
		if err != nil {
			t.Fatal(err)
		}
	}
}

// client speaks to one shop.
type client struct {
	t    testing.TB
	url  string
	http *http.Client
}

func newClient(t testing.TB, url string) *client {
	t.Helper()
	transport := &http.Transport{MaxIdleConnsPerHost: 1000}
	t.Cleanup(transport.CloseIdleConnections)
	return &client{t, url, &http.Client{Transport: transport, Timeout: 2 * testenv.Patience}}
}

// reply is an answer of the shop.
type reply struct {
	t      testing.TB
	status int
	header http.Header
	body   []byte
}

// newUser returns a new user, with all units of the rate limit.
func newUser() string { return "user-" + strings.ToLower(rand.Text()[:12]) }

func newKey() string { return string(idempotency.NewKey()) }

// post sends a request. An empty body sends none.
func (c *client) post(user, key, path, body string) reply {
	c.t.Helper()
	r, err := c.tryPost(user, key, path, body)
	noError(c.t, err)
	return r
}

// tryPost is post for goroutines that must not end the test.
func (c *client) tryPost(user, key, path, body string) (reply, error) {
	req, err := http.NewRequest(http.MethodPost, c.url+path, bytes.NewBufferString(body))
	if err != nil {
		return reply{}, err
	}
	req.Header.Set("X-Mock-User-Id", user)
	req.Header.Set("Idempotency-Key", key)
	if body != "" {
		req.Header.Set("Content-Type", "application/json")
	}
	return c.send(req)
}

func (c *client) get(path string) reply {
	c.t.Helper()
	r, err := c.tryGet(path)
	noError(c.t, err)
	return r
}

func (c *client) tryGet(path string) (reply, error) {
	req, err := http.NewRequest(http.MethodGet, c.url+path, nil)
	if err != nil {
		return reply{}, err
	}
	return c.send(req)
}

func (c *client) send(req *http.Request) (reply, error) {
	resp, err := c.http.Do(req)
	if err != nil {
		return reply{}, err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	return reply{c.t, resp.StatusCode, resp.Header, body}, err
}

// code is the member code of a problem, "" for other answers.
func (r reply) code() string {
	if r.header.Get("Content-Type") != "application/problem+json" {
		return ""
	}
	var p struct{ Code string }
	_ = json.Unmarshal(r.body, &p) // then the code is missing
	return p.Code
}

func (r reply) wants(status int, code string) reply {
	r.t.Helper()
	if r.status != status || r.code() != code {
		r.t.Fatalf("answer is %d %q, want %d %q: %s", r.status, r.code(), status, code, r.body)
	}
	return r
}

func (r reply) into(v any) {
	r.t.Helper()
	if err := json.Unmarshal(r.body, v); err != nil {
		r.t.Fatalf("%v in %s", err, r.body)
	}
}

type reservation struct {
	ID        string
	EventID   string `json:"event_id"`
	Seats     []string
	Status    string
	ExpiresAt time.Time `json:"expires_at"`
}

type stats struct{ Held, Confirmed, Cancelled, Expired int }

// newEvent creates an event and returns its id.
func (c *client) newEvent(body string) string {
	c.t.Helper()
	var e struct{ ID string }
	c.post(newUser(), newKey(), "/api/events", body).wants(http.StatusCreated, "").into(&e)
	return e.ID
}

func (c *client) hold(user, eventID, rest string) reservation {
	c.t.Helper()
	var r reservation
	c.post(user, newKey(), "/api/reservations", holdBody(eventID, rest)).wants(http.StatusCreated, "").into(&r)
	return r
}

func holdBody(eventID, rest string) string { return `{"event_id":"` + eventID + `",` + rest + `}` }

func (c *client) status(reservationID string) string {
	c.t.Helper()
	var r reservation
	c.get("/api/reservations/"+reservationID).wants(http.StatusOK, "").into(&r)
	return r.Status
}

func (c *client) stats(eventID string) stats {
	c.t.Helper()
	var s stats
	c.get("/api/events/"+eventID+"/stats").wants(http.StatusOK, "").into(&s)
	return s
}

// seats counts the seats of an event by state.
func (c *client) seats(eventID string) map[string]int {
	c.t.Helper()
	var m struct{ Map []struct{ State string } }
	c.get("/api/events/"+eventID).wants(http.StatusOK, "").into(&m)
	counts := map[string]int{}
	for _, seat := range m.Map {
		counts[seat.State]++
	}
	return counts
}
