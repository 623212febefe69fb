// Package shop runs the reservation example as processes, for tests and commands of other packages. They must call Remove
// at their end.
//
// timing: its processes serve nightly tests and commands.
package shop

import (
	"bytes"
	"context"
	"errors"
	"fmt"
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

	"github.com/holdfast-go/holdfast/internal/testenv"
)

const example = "github.com/holdfast-go/holdfast/examples/reservation"

// dir holds the binaries.
var dir = filepath.Join(os.TempDir(), fmt.Sprintf("holdfast-shop-%d", os.Getpid()))

// Binary builds the shop, once per process, and returns its path.
var Binary = sync.OnceValues(func() (string, error) { return Build(context.Background(), example) })

// Build builds a command of this repository and returns its path.
func Build(ctx context.Context, pkg string) (string, error) {
	path := filepath.Join(dir, filepath.Base(pkg))
	if out, err := exec.CommandContext(ctx, "go", "build", "-buildvcs=false", "-o", path, pkg).CombinedOutput(); err != nil {
		return "", fmt.Errorf("go build: %w\n%s", err, out)
	}
	return path, nil
}

// ErrNoCommit means that this clone does not have a commit: a shallow clone has no history.
var ErrNoCommit = errors.New("not in this clone (git fetch --unshallow gets the whole history)")

// Commit returns the short name of a commit, as git does. It fails with ErrNoCommit if there is none.
func Commit(ctx context.Context, rev string) (string, error) {
	out, err := exec.CommandContext(ctx, "git", "rev-parse", "--short", "--verify", "--quiet", rev+"^{commit}").Output()
	if err != nil {
		return "", fmt.Errorf("commit %s: %w", rev, ErrNoCommit)
	}
	return strings.TrimSpace(string(out)), nil
}

// BinaryOf builds the shop of a commit, once per process, and returns its path. It fails with ErrNoCommit if there is no
// such commit.
func BinaryOf(ctx context.Context, rev string) (string, error) {
	name, err := Commit(ctx, rev)
	if err != nil {
		return "", err
	}
	path := filepath.Join(dir, "reservation-"+name)
	if _, err := os.Stat(path); err == nil {
		return path, nil
	}
	source := path + "-source"
	defer os.RemoveAll(source)
	if err := checkOut(ctx, name, source); err != nil {
		return "", err
	}
	build := exec.CommandContext(ctx, "go", "build", "-buildvcs=false", "-o", path, "./examples/reservation")
	build.Dir = source
	build.Env = append(os.Environ(), "GOWORK="+filepath.Join(source, "go.work"))
	if out, err := build.CombinedOutput(); err != nil {
		return "", fmt.Errorf("go build of commit %s: %w\n%s", name, err, out)
	}
	return path, nil
}

// checkOut writes the files of a commit into a new folder.
func checkOut(ctx context.Context, rev, folder string) error {
	root, err := exec.CommandContext(ctx, "git", "rev-parse", "--show-toplevel").Output()
	if err != nil {
		return fmt.Errorf("git rev-parse: %w", err)
	}
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return err
	}
	packed := folder + ".tar"
	defer os.Remove(packed)
	archive := exec.CommandContext(ctx, "git", "-C", strings.TrimSpace(string(root)), "archive", "-o", packed, rev)
	if out, err := archive.CombinedOutput(); err != nil {
		return fmt.Errorf("git archive: %s", bytes.TrimSpace(out))
	}
	if out, err := exec.CommandContext(ctx, "tar", "-x", "-C", folder, "-f", packed).CombinedOutput(); err != nil {
		return fmt.Errorf("tar: %s", bytes.TrimSpace(out))
	}
	return nil
}

// Remove removes the built binaries.
func Remove() { _ = os.RemoveAll(dir) }

// ErrEnded is the error of AwaitListening if the process ended instead.
var ErrEnded = errors.New("the shop ended before it listened")

// Process is a shop in its own process, which may be killed, stopped and started again. Its methods may be called from any
// goroutine, but Start, Kill and Terminate only one at a time.
type Process struct {
	// Name is the name of the process in errors.
	Name string
	// On starts the command in a different network: see package hosts. Optional.
	On   func(cmd *exec.Cmd) (ended <-chan error, err error)
	args []string
	env  []string

	mu  sync.Mutex
	run *run // the newest; nil before the first Start
	log log  // of all runs
}

// run is the time from one start of a process to its end.
type run struct {
	cmd       *exec.Cmd
	url       string
	listening chan struct{} // closed when url is set
	ended     chan struct{} // closed when the process was waited for
	err       error         // from Wait
}

// New returns a shop that Start starts. env is added to the environment of this process.
func New(name string, env []string, args ...string) *Process {
	return &Process{Name: name, env: env, args: append([]string{"-addr=127.0.0.1:0"}, args...)}
}

// Start runs a shop until the test ends, and returns when it listens.
func Start(t testing.TB, env []string, args ...string) *Process {
	t.Helper()
	path, err := Binary()
	if err != nil {
		t.Fatal(err)
	}
	p := New("the shop", env, args...)
	if err := p.Start(path); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		p.Kill()
		if t.Failed() {
			t.Logf("log of the shop:\n%s", p.Log())
		}
	})
	if err := p.AwaitListening(testenv.Patience); err != nil {
		t.Fatal(err)
	}
	return p
}

// Start runs the binary at path. Use it again after the process has ended, like a supervisor.
func (p *Process) Start(path string) error {
	r := &run{cmd: exec.Command(path, p.args...), listening: make(chan struct{}), ended: make(chan struct{})}
	r.cmd.Env, r.cmd.Stderr = append(os.Environ(), p.env...), &p.log
	r.cmd.Stdout = &announcement{found: func(url string) {
		p.mu.Lock()
		defer p.mu.Unlock()
		r.url = url
		close(r.listening)
	}}
	r.cmd.SysProcAttr = &syscall.SysProcAttr{}
	testenv.DieWithParent(r.cmd.SysProcAttr)
	on := p.On
	if on == nil {
		on = startHere
	}
	ended, err := on(r.cmd)
	if err != nil {
		return fmt.Errorf("%s: %w", p.Name, err)
	}
	go func() {
		r.err = <-ended
		close(r.ended)
	}()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.run = r
	return nil
}

// startHere starts a command, and keeps the thread until it ends, because the command dies with the thread.
func startHere(cmd *exec.Cmd) (ended <-chan error, err error) {
	started, done := make(chan error, 1), make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err == nil {
			done <- cmd.Wait()
		}
	}()
	return done, <-started
}

func (p *Process) newest() *run {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.run
}

// AwaitListening returns when the process listens. It fails with ErrEnded, or when patience is over.
func (p *Process) AwaitListening(patience time.Duration) error {
	r := p.newest()
	select {
	case <-r.listening:
		return nil
	case <-r.ended:
		return fmt.Errorf("%s: %w", p.Name, ErrEnded)
	case <-time.After(patience):
		return fmt.Errorf("%s does not listen", p.Name)
	}
}

// URL returns the address of the process, "" while it starts.
func (p *Process) URL() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.run.url
}

// Ended reports whether the process has ended.
func (p *Process) Ended() bool {
	select {
	case <-p.newest().ended:
		return true
	default:
		return false
	}
}

// PID is the id of the process.
func (p *Process) PID() int { return p.newest().cmd.Process.Pid }

// Signal sends a signal to the process.
func (p *Process) Signal(sig syscall.Signal) error { return p.newest().cmd.Process.Signal(sig) }

// Kill ends the process as a power cut would.
func (p *Process) Kill() {
	r := p.newest()
	if r == nil {
		return
	}
	_ = r.cmd.Process.Kill() // it may have ended
	<-r.ended
}

// Terminate asks the process to end and returns how long that took. It fails if the process takes longer than patience or
// its exit code is not 0.
func (p *Process) Terminate(patience time.Duration) (time.Duration, error) {
	r, began := p.newest(), time.Now()
	if err := r.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		return 0, fmt.Errorf("%s: %w", p.Name, err)
	}
	select {
	case <-r.ended:
	case <-time.After(patience):
		return patience, fmt.Errorf("%s is still there %v after SIGTERM", p.Name, patience)
	}
	if r.err != nil {
		return time.Since(began), fmt.Errorf("%s after SIGTERM: %w", p.Name, r.err)
	}
	return time.Since(began), nil
}

// readyClient waits for an answer as long as a load balancer would.
var readyClient = &http.Client{Timeout: 3 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}

// AllReady calls Ready of all processes in parallel.
func AllReady[P interface{ Ready() error }](processes []P) error {
	errs := make([]error, len(processes))
	var asking sync.WaitGroup
	for i, p := range processes {
		asking.Go(func() { errs[i] = p.Ready() })
	}
	asking.Wait()
	return errors.Join(errs...)
}

// Ready requests /readyz.
func (p *Process) Ready() error {
	url := p.URL()
	if url == "" {
		return fmt.Errorf("%s does not listen", p.Name)
	}
	resp, err := readyClient.Get(url + "/readyz")
	if err != nil {
		return fmt.Errorf("%s: %w", p.Name, err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s", p.Name, resp.Status)
	}
	return nil
}

// EndsWithin is how long a shop may take to end after a signal. It promises 58 s.
const EndsWithin = 59 * time.Second

// Roles are the processes of one shop.
type Roles []*Process

// Stop asks all processes to end, in their order.
func (all Roles) Stop() error {
	var errs []error
	for _, p := range all {
		if _, err := p.Terminate(EndsWithin); err != nil {
			p.Kill()
			errs = append(errs, fmt.Errorf("%w; end of its log:\n%s", err, p.Log()))
		}
	}
	return errors.Join(errs...)
}

// Start runs a process of a shop, and returns when it listens. Rate limits are counted but never reached. Later flags
// override earlier ones.
func (d *Data) Start(role string, flags ...string) (*Process, error) {
	path, err := Binary()
	if err != nil {
		return nil, err
	}
	named := d.Servers
	named.Database += "&application_name=" + role // pg_stat_activity shows the role of a connection
	p := New(role, named.Env(), slices.Concat([]string{"-backend=services", "-role=" + role, "-user-limit=1000000000", "-global-limit=1000000000"}, flags)...)
	if err := p.Start(path); err != nil {
		return nil, err
	}
	if err := p.AwaitListening(testenv.Patience); err != nil {
		p.Kill()
		return nil, fmt.Errorf("%w; end of its log:\n%s", err, p.Log())
	}
	return p, nil
}

// Log returns the end of the logs of all runs of this process.
func (p *Process) Log() string { return p.log.String() }

// Complaints counts the warnings and errors in the logs of all runs of this process.
func (p *Process) Complaints() int { return p.log.count() }

// longestLog is how much of a log is kept at least; twice as much at most. A fault may cause many lines.
const longestLog = 256 << 10

// log keeps the end of the processes' logs, and counts warnings and errors.
type log struct {
	mu         sync.Mutex
	text       []byte
	complaints int
}

// Write receives log output, usually in whole lines. It does not count a line whose level is split over two writes.
func (l *log) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.complaints += bytes.Count(p, []byte("level=WARN")) + bytes.Count(p, []byte("level=ERROR"))
	l.text = append(l.text, p...)
	if len(l.text) > 2*longestLog {
		l.text = append([]byte(nil), l.text[len(l.text)-longestLog:]...)
	}
	return len(p), nil
}

func (l *log) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return string(l.text)
}

func (l *log) count() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.complaints
}

// announcement is the standard output of a shop. It finds the shop's address.
type announcement struct {
	said  strings.Builder
	found func(url string) // nil after the call
}

func (a *announcement) Write(p []byte) (int, error) {
	if a.found == nil {
		return len(p), nil
	}
	a.said.Write(p)
	_, after, ok := strings.Cut(a.said.String(), "listening on ")
	if url, _, whole := strings.Cut(after, " "); ok && whole {
		a.found(url)
		a.found = nil
	}
	return len(p), nil
}
