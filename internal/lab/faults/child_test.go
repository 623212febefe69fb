package faults_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/internal/testenv"
)

// The variables that make this test binary a child.
const (
	roleVar = "HOLDFAST_FAULTS_ROLE"
	jobVar  = "HOLDFAST_FAULTS_JOB"
)

// readyLine is what a child prints when it is at work.
const readyLine = "ready"

// roles are what a child can be. Each decodes its job, calls ready when it is at work, works until
// ctx ends (SIGTERM) and returns what to report, as JSON.
var roles = map[string]func(ctx context.Context, job []byte, ready func()) (any, error){
	"relay":   relayRole,
	"inbox":   inboxRole,
	"deploy":  deployRole,
	"backlog": backlogRole,

	"idempotency": idempotencyRole,
}

func runChild(role string) int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	work, ok := roles[role]
	if !ok {
		fmt.Fprintln(os.Stderr, "no such role:", role)
		return 2
	}
	report, err := work(ctx, []byte(os.Getenv(jobVar)), func() { fmt.Println(readyLine) })
	if err == nil {
		err = json.NewEncoder(os.Stdout).Encode(report)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

// child is this test binary in a process of its own, which a test may kill, stop and end.
type child struct {
	t      testing.TB
	cmd    *exec.Cmd
	out    *screen
	errors bytes.Buffer // to be read once ended is closed
	ended  chan struct{}
	err    error // of Wait
}

// spawn starts a child. It ends with the test, and with this process where the system can arrange
// that: Linux ties a child to the thread that forked it, which is kept until then.
func spawn(t testing.TB, role string, job any) *child {
	t.Helper()
	text, err := json.Marshal(job)
	must(t, err)
	self, err := os.Executable()
	must(t, err)
	c := &child{t: t, cmd: exec.Command(self), out: &screen{ready: make(chan struct{})}, ended: make(chan struct{})}
	c.cmd.Env = append(os.Environ(), roleVar+"="+role, jobVar+"="+string(text))
	c.cmd.Stdout, c.cmd.Stderr = c.out, &c.errors
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
	t.Cleanup(c.kill)
	return c
}

const childPatience = patience

// awaitReady waits until the child is at work.
func (c *child) awaitReady() {
	c.t.Helper()
	select {
	case <-c.out.ready:
	case <-c.ended:
		c.t.Fatalf("the child ended at once: %v\n%s", c.err, c.errors.String())
	case <-time.After(childPatience):
		c.t.Fatal("the child does not get to work")
	}
}

func (c *child) signal(sig syscall.Signal) {
	c.t.Helper()
	must(c.t, c.cmd.Process.Signal(sig))
}

// kill ends the child as a power cut would.
func (c *child) kill() {
	_ = c.cmd.Process.Kill() // it may have ended
	<-c.ended
}

// end asks the child to end, wants it to do so well, and decodes its report.
func (c *child) end(report any) {
	c.t.Helper()
	c.signal(syscall.SIGTERM)
	c.wait(report)
}

// wait is end for a child that ends by itself.
func (c *child) wait(report any) {
	c.t.Helper()
	select {
	case <-c.ended:
	case <-time.After(3 * childPatience):
		c.t.Fatal("the child does not end")
	}
	if c.err != nil {
		c.t.Fatalf("the child ended badly: %v\n%s", c.err, c.errors.String())
	}
	must(c.t, json.Unmarshal(c.out.rest(), report))
}

// screen is where a child prints to.
type screen struct {
	ready chan struct{} // closed by the first line

	mu   sync.Mutex
	text []byte
	seen bool
}

func (s *screen) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.text = append(s.text, p...)
	if !s.seen && bytes.HasPrefix(s.text, []byte(readyLine+"\n")) {
		s.seen = true
		close(s.ready)
	}
	return len(p), nil
}

// rest is what follows the first line.
func (s *screen) rest() []byte {
	s.mu.Lock()
	defer s.mu.Unlock()
	return bytes.TrimPrefix(s.text, []byte(readyLine+"\n"))
}
