package shop

import (
	"bufio"
	"bytes"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/internal/testenv"
)

// Process is a shop that runs.
type Process struct {
	// URL is where it listens.
	URL   string
	cmd   *exec.Cmd
	ended chan struct{}
}

// Start runs a shop until the test ends, and returns when it listens. Env is added to the environment.
func Start(t testing.TB, env []string, flags ...string) *Process {
	t.Helper()
	path, err := Binary()
	if err != nil {
		t.Fatal(err)
	}
	stdout, said, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	var log bytes.Buffer
	cmd := exec.Command(path, append([]string{"-addr=127.0.0.1:0"}, flags...)...)
	cmd.Env, cmd.Stdout, cmd.Stderr = append(os.Environ(), env...), said, &log
	p := &Process{cmd: cmd, ended: make(chan struct{})}
	err = p.start()
	_ = said.Close() // the process has its own
	if err != nil {
		_ = stdout.Close()
		t.Fatal(err)
	}
	t.Cleanup(func() {
		p.Kill()
		if t.Failed() {
			t.Logf("the shop said:\n%s", &log)
		}
	})
	listening := make(chan string, 1)
	go listen(stdout, listening)
	select {
	case p.URL = <-listening:
	case <-p.ended:
		t.Fatal("the shop ended before it listened")
	case <-time.After(testenv.Patience):
		t.Fatal("the shop does not listen")
	}
	return p
}

// start starts the process. It dies with the thread that started it, which is kept for as long.
func (p *Process) start() error {
	p.cmd.SysProcAttr = &syscall.SysProcAttr{}
	testenv.DieWithParent(p.cmd.SysProcAttr)
	started := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := p.cmd.Start()
		started <- err
		if err == nil {
			_ = p.cmd.Wait() // it is killed
			close(p.ended)
		}
	}()
	return <-started
}

// listen reads what the process says to its end, and tells where it listens.
func listen(stdout io.ReadCloser, listening chan<- string) {
	defer func() { _ = stdout.Close() }()
	for lines := bufio.NewScanner(stdout); lines.Scan(); {
		if _, after, ok := strings.Cut(lines.Text(), "listening on "); ok {
			address, _, _ := strings.Cut(after, " ")
			listening <- address
		}
	}
}

// Kill ends the process as a power cut would.
func (p *Process) Kill() {
	_ = p.cmd.Process.Kill() // it may have ended
	<-p.ended
}
