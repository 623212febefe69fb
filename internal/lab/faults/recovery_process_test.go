package faults_test

import (
	"bytes"
	"fmt"
	"net/http"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/internal/lab/shop"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// role is one process of the shop, which a test may kill, stop and replace.
type role struct {
	t    testing.TB
	name string
	args []string
	env  []string

	mu  sync.Mutex
	url string
	cmd *exec.Cmd
	log *roleLog
	// said counts the warnings and errors of the processes before.
	said int
	// ended is closed when cmd was waited for; err is what Wait said.
	ended chan struct{}
	err   error
}

// startRole runs the shop in one role until the test ends, and waits until it listens.
func startRole(t testing.TB, env []string, name string, args ...string) *role {
	t.Helper()
	r := &role{t: t, name: name, env: env, args: append([]string{
		"-backend=services", "-addr=127.0.0.1:0", "-role=" + name,
	}, args...)}
	r.start()
	t.Cleanup(r.kill)
	r.awaitListening()
	return r
}

// start runs the program, as a supervisor does after it has ended.
func (r *role) start() {
	r.t.Helper()
	path, err := shop.Binary()
	must(r.t, err)
	cmd := exec.Command(path, r.args...)
	log := &roleLog{listening: make(chan string, 1)}
	cmd.Env, cmd.Stdout, cmd.Stderr = r.env, log.out(), log
	cmd.SysProcAttr = &syscall.SysProcAttr{}
	testenv.DieWithParent(cmd.SysProcAttr)
	ended, started := make(chan struct{}), make(chan error, 1)
	go func() {
		runtime.LockOSThread() // the child dies with this thread
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err == nil {
			err = cmd.Wait()
			r.mu.Lock()
			r.err = err
			r.mu.Unlock()
			close(ended)
		}
	}()
	must(r.t, <-started)
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.log != nil {
		r.said += r.log.complaints()
	}
	r.cmd, r.log, r.ended, r.url, r.err = cmd, log, ended, "", nil
}

func (r *role) awaitListening() {
	r.t.Helper()
	r.mu.Lock()
	log, ended := r.log, r.ended
	r.mu.Unlock()
	select {
	case url := <-log.listening:
		r.mu.Lock()
		r.url = url
		r.mu.Unlock()
	case <-ended:
		r.t.Errorf("%s ended before it listened", r.name)
	case <-time.After(childPatience):
		r.t.Errorf("%s does not listen", r.name)
	}
}

// address is where the process listens, "" while it starts.
func (r *role) address() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.url
}

func (r *role) signal(sig syscall.Signal) {
	r.t.Helper()
	must(r.t, r.cmd.Process.Signal(sig))
}

// kill ends the process as a power cut would.
func (r *role) kill() {
	_ = r.cmd.Process.Kill() // it may have ended
	<-r.ended
}

// terminate asks the process to end and returns how long that took; it wants exit code 0.
func (r *role) terminate(patience time.Duration) (time.Duration, error) {
	began := time.Now()
	if err := r.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		return 0, err
	}
	select {
	case <-r.ended:
	case <-time.After(patience):
		return patience, fmt.Errorf("%s is still there %v after SIGTERM", r.name, patience)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.err != nil {
		return time.Since(began), fmt.Errorf("%s after SIGTERM: %w", r.name, r.err)
	}
	return time.Since(began), nil
}

// complaints counts the warnings and errors of this process and those it has replaced.
func (r *role) complaints() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.said + r.log.complaints()
}

// ready asks /readyz, for as long as the client's timeout.
func (r *role) ready(client *http.Client) error {
	url := r.address()
	if url == "" {
		return fmt.Errorf("%s does not listen", r.name)
	}
	resp, err := client.Get(url + "/readyz")
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s", r.name, resp.Status)
	}
	return nil
}

// roleLog keeps what a process says, and finds where it listens.
type roleLog struct {
	listening chan string

	mu     sync.Mutex
	stdout bytes.Buffer
	stderr bytes.Buffer
	found  bool
}

func (l *roleLog) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.stderr.Write(p)
}

func (l *roleLog) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.stderr.String()
}

// complaints counts the warnings and errors.
func (l *roleLog) complaints() int {
	text := l.String()
	return strings.Count(text, "level=WARN") + strings.Count(text, "level=ERROR")
}

// out is the standard output of the process.
func (l *roleLog) out() writerFunc {
	return func(p []byte) (int, error) {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.stdout.Write(p)
		_, after, ok := strings.Cut(l.stdout.String(), "listening on ")
		if url, _, whole := strings.Cut(after, " "); ok && whole && !l.found {
			l.found = true
			l.listening <- url
		}
		return len(p), nil
	}
}

type writerFunc func(p []byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }
