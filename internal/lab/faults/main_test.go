// Package faults tests the packages with killed processes and broken real servers, where a simulation on the fakes
// is not enough. It contains tests only.
//
// A kill between COMMIT and ack runs with every change, once for each adapter. All other tests run at night: they
// kill at every other point, and check the promised recovery times on an idle machine. Package chaos tests the
// whole shop under many faults at once.
package faults_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/internal/testenv"
)

func TestMain(m *testing.M) {
	if role := os.Getenv(roleVar); role != "" {
		os.Exit(runChild(role))
	}
	os.Exit(testenv.Run(m))
}

var quiet = slog.New(slog.DiscardHandler)

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// beside runs work until stop is called or the test ends, and fails the test with its error.
func beside(t testing.TB, work func(ctx context.Context) error) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	var running sync.WaitGroup
	running.Go(func() {
		if err := work(ctx); err != nil {
			t.Error(err)
		}
	})
	stop = func() {
		cancel()
		running.Wait()
	}
	t.Cleanup(stop)
	return stop
}

// The variables that make this test binary a child.
const (
	roleVar = "HOLDFAST_FAULTS_ROLE"
	jobVar  = "HOLDFAST_FAULTS_JOB"
)

// roles are the programs that a child can be. Each decodes its job, and works until it is killed.
var roles = map[string]func(ctx context.Context, job []byte) error{
	"relay":       relayRole,
	"inbox":       inboxRole,
	"idempotency": idempotencyRole,
}

func runChild(role string) int {
	if err := roles[role](context.Background(), []byte(os.Getenv(jobVar))); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

// child is this test binary in its own process.
type child struct {
	t      testing.TB
	cmd    *exec.Cmd
	errors bytes.Buffer  // to be read once ended is closed
	ended  chan struct{} // closed at its end
	err    error         // from Wait
}

// spawn starts a child. It ends with the test, and with this process if the system supports that. Linux ties a
// child to the thread that forked it, so that thread is kept.
func spawn(t testing.TB, role string, job any) *child {
	t.Helper()
	text, err := json.Marshal(job)
	must(t, err)
	self, err := os.Executable()
	must(t, err)
	c := &child{t: t, cmd: exec.Command(self), ended: make(chan struct{})}
	c.cmd.Env = append(os.Environ(), roleVar+"="+role, jobVar+"="+string(text))
	c.cmd.Stderr = &c.errors
	c.cmd.SysProcAttr = &syscall.SysProcAttr{}
	testenv.DieWithParent(c.cmd.SysProcAttr)
	started := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := c.cmd.Start()
		started <- err
		if err == nil {
			c.err = c.cmd.Wait()
			close(c.ended)
		}
	}()
	must(t, <-started)
	t.Cleanup(func() {
		_ = c.cmd.Process.Kill() // it may have ended
		<-c.ended
	})
	return c
}

// untilKilled waits until the child has killed itself.
func (c *child) untilKilled() {
	c.t.Helper()
	select {
	case <-c.ended:
	case <-time.After(testenv.Patience):
		c.t.Fatal("the child does not end")
	}
	if !c.killed() {
		c.t.Fatalf("the child was not killed: %v\n%s", c.err, c.errors.String())
	}
}

func (c *child) killed() bool {
	status, ok := c.cmd.ProcessState.Sys().(syscall.WaitStatus)
	return ok && status.Signal() == syscall.SIGKILL
}

// crash kills this process at a point of its work.
type crash struct {
	Point string
	After int // the process passes the point so often first
}

var crashing sync.Mutex

func (c *crash) pass(point string) {
	if point != c.Point {
		return
	}
	crashing.Lock()
	defer crashing.Unlock()
	if c.After > 0 {
		c.After--
		return
	}
	killSelf()
}

// killSelf ends the process as a power cut would.
func killSelf() {
	_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
	select {} // the signal comes at once, but perhaps to another thread
}

// subject is a component whose process is killed.
type subject struct {
	name string
	// open creates databases and queues. It skips the test if a server is missing.
	open func(t *testing.T) work
	// points are the points where the process can be killed, in the order of the work. At toAck it has committed
	// but not acknowledged.
	points  []string
	toAck   string
	nightly string // the reason to kill only at night; "" means with every change
}

// work is a load for one process, with a check of all results.
type work interface {
	// prepare writes messages, or chooses a request.
	prepare()
	// spawn starts the process that will be killed.
	spawn(crash crash) *child
	// finish does the remaining work in this process or another one, and checks everything.
	finish()
}

var subjects = []subject{
	{"outbox on RabbitMQ", relayOnRabbitMQ, relayPoints, "confirmed", ""},
	{"outbox on Redis", relayOnRedis, relayPoints, "confirmed", ""},
	{"outbox on NATS", relayOnNATS, relayPoints, "confirmed", ""},
	{"inbox on RabbitMQ", inboxOnRabbitMQ, inboxPoints, "committed", ""},
	{"inbox on Redis", inboxOnRedis, inboxPoints, "committed", "a consumer takes over entries that are idle for 8 s"},
	{"inbox on NATS", inboxOnNATS, inboxPoints, "committed", "a consumer gets the messages of a killed one after 8 s"},
	{"partitions on RabbitMQ", partitionsOnRabbitMQ, orderedPoints, "committed", ""},
	{"partitions on Redis", partitionsOnRedis, orderedPoints, "committed", "a consumer takes over entries that are idle for 8 s"},
	{"partitions on NATS", partitionsOnNATS, orderedPoints, "committed", "a consumer takes over a lease that ends after 8 s"},
	{"idempotency, Redis before Postgres", idempotencyBehind(redisGate), idempotencyPoints, "committed", ""},
	{"idempotency, a gate that fails", idempotencyBehind(failingGate), idempotencyPoints, "committed", ""},
	{"idempotency, a lease in Postgres", idempotencyBehind(postgresGate), idempotencyPoints, "committed", ""},
	{"idempotency, Postgres alone", idempotencyBehind(noGate), idempotencyPoints, "committed", ""},
}

// A process dies between its COMMIT and the ack. Another one takes over: nothing is lost, and each effect happens
// once.
func TestKill_betweenCommitAndAck(t *testing.T) {
	t.Parallel()
	for _, s := range subjects {
		t.Run(s.name, func(t *testing.T) {
			t.Parallel()
			if s.nightly != "" {
				testenv.Nightly(t, s.nightly)
			}
			killAt(t, s.open(t), crash{Point: s.toAck, After: 2})
		})
	}
}

// The same at every other point, at the first message and in the middle.
func TestKill_atEveryPoint(t *testing.T) {
	t.Parallel()
	testenv.Nightly(t, "kills dozens of processes")
	for _, s := range subjects {
		t.Run(s.name, func(t *testing.T) {
			t.Parallel()
			w := s.open(t)
			for _, point := range s.points {
				for _, after := range []int{0, 3} {
					killAt(t, w, crash{point, after})
				}
			}
		})
	}
}

func killAt(t *testing.T, w work, c crash) {
	t.Helper()
	w.prepare()
	child := w.spawn(c)
	child.untilKilled()
	w.finish()
	if t.Failed() {
		t.Fatalf("after a kill at %q, passed %d times before", c.Point, c.After)
	}
}

// A message that crashes its process is quarantined after MaxCrashes. The messages next to it are processed once.
func TestKiller_isQuarantined(t *testing.T) {
	t.Parallel()
	testenv.Nightly(t, "loses a process five times in a row")
	for name, open := range map[string]func(*testing.T) work{"RabbitMQ": inboxOnRabbitMQ, "Redis": inboxOnRedis, "NATS": inboxOnNATS} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			i := open(t).(*intake)
			i.prepare()
			i.send(doKill)
			crashes := 0
			c := i.spawn(crash{})
			testenv.Eventually(t, func() error {
				select {
				case <-c.ended:
					if crashes++; crashes > 2*maxCrashes {
						t.Fatalf("the process ended %d times", crashes)
					}
					c = i.spawn(crash{})
				default:
				}
				if n := len(i.letters()); n != 1 {
					return fmt.Errorf("%d dead letters and %d crashes", n, crashes)
				}
				return i.settled()
			})
			if letter := i.letters()[0]; letter.Class != "quarantined" {
				t.Errorf("the killer is a dead letter of class %s", letter.Class)
			}
			// The first run counts only if the session was lost before it; otherwise it was not recorded.
			if !slices.Contains([]int{maxCrashes, maxCrashes + 1}, crashes) {
				t.Errorf("the process ended %d times, want %d: the first, and those counted", crashes, maxCrashes+1)
			}
			i.verify()
		})
	}
}
