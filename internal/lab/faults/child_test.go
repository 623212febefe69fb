package faults_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
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

// child is this test binary in a process of its own.
type child struct {
	t      testing.TB
	cmd    *exec.Cmd
	errors bytes.Buffer  // to be read once ended is closed
	ended  chan struct{} // closed at its end
	err    error         // of Wait
}

// spawn starts a child. It ends with the test, and with this process where the system can arrange
// that: Linux ties a child to the thread that forked it, which is kept until then.
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
