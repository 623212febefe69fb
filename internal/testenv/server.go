package testenv

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// Host is a machine for servers: a network of its own. The zero Host is this process's network, at 127.0.0.1.
type Host struct {
	// Address is the address on which the servers listen. Nodes of a cluster use it for each other, too.
	Address string

	// Enter moves the calling thread into the network. The thread starts one process and ends with it.
	Enter func() error
}

// apart reports whether the host has its own network.
func (h Host) apart() bool { return h.Address != "" }

func (h Host) address() string { return cmp.Or(h.Address, "127.0.0.1") }

// at returns the address with a port.
func (h Host) at(port int) string { return h.address() + ":" + strconv.Itoa(port) }

// tuple returns the address in Erlang's notation.
func (h Host) tuple() string { return "{" + strings.ReplaceAll(h.address(), ".", ",") + "}" }

// run runs a command on the host.
func (h Host) run(cmd *exec.Cmd) (output []byte, err error) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		if h.Enter != nil {
			runtime.LockOSThread() // and never unlocked: the thread is now in another network
			if err = h.Enter(); err != nil {
				return
			}
		}
		output, err = cmd.CombinedOutput()
	}()
	<-done
	return output, err
}

// Launch starts a private server and returns when it answers. The caller must Close it.
//
// extra depends on the kind:
//   - Postgres and Redis: command-line arguments, such as "-c", "max_connections=5" or "--appendonly", "yes";
//   - RabbitMQ and NATS: lines of rabbitmq.conf and of nats.conf;
//   - PgBouncer: the address of its Postgres, then lines of pgbouncer.ini;
//   - Prometheus: the lines of prometheus.yml.
//
// The error is ErrNotInstalled if there are no binaries.
func Launch(ctx context.Context, kind Kind, extra ...string) (*Server, error) {
	return LaunchSpec(ctx, Spec{Kind: kind, Extra: extra})
}

// Spec describes a server for LaunchSpec.
type Spec struct {
	Kind Kind

	// Extra is as for Launch.
	Extra []string

	// Dir is the parent of the server's folder; "" means the system's folder for temporary files.
	Dir string

	// Env is added to the environment of the server's processes.
	Env []string

	// Host is where the server runs.
	Host Host

	// Follows is the address of another Postgres or Redis. This server is its standby or replica until Promote. The
	// address may be a Proxy's.
	Follows string
}

// LaunchSpec is Launch with more settings.
func LaunchSpec(ctx context.Context, spec Spec) (*Server, error) {
	const attempts = 3 // another process may take a free port before the server does
	var err error
	for range attempts {
		var s *Server
		if s, err = launch(ctx, spec); err == nil {
			return s, nil
		}
		if !portTaken(err) {
			break
		}
	}
	return nil, err
}

func launch(ctx context.Context, spec Spec) (_ *Server, err error) {
	e, err := newEngine(spec)
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp(spec.Dir, "holdfast-")
	if err != nil {
		return nil, fmt.Errorf("testenv: %s: %w", spec.Kind, err)
	}
	s := &Server{kind: spec.Kind, dir: dir, env: spec.Env, enter: spec.Host.Enter, engine: e}
	if !live.add(s) {
		return nil, errors.Join(fmt.Errorf("testenv: %s: the process is shutting down", spec.Kind), os.RemoveAll(dir))
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.Close())
		}
	}()
	if err := e.prepare(ctx, dir); err != nil {
		return nil, fmt.Errorf("testenv: prepare %s: %w", spec.Kind, err)
	}
	return s, s.Start(ctx)
}

func newEngine(spec Spec) (engine, error) {
	switch spec.Kind {
	case Postgres:
		return newPostgres(spec)
	case Redis:
		return newRedis(spec)
	case RabbitMQ:
		return newRabbitMQ(spec)
	case NATS:
		return newNATS(spec)
	case PgBouncer:
		return newPgBouncer(spec)
	case Prometheus:
		return newPrometheus(spec.Extra)
	default:
		return nil, fmt.Errorf("testenv: unknown kind %q", spec.Kind)
	}
}

// ErrNotInstalled means that the machine lacks the server's binaries.
var ErrNotInstalled = errors.New("testenv: not installed")

// Kind names a server product.
type Kind string

// The servers that Launch and Private can start.
const (
	Postgres Kind = "postgres"
	Redis    Kind = "redis"
	RabbitMQ Kind = "rabbitmq"
	NATS     Kind = "nats"

	// PgBouncer pools the connections of another server.
	PgBouncer Kind = "pgbouncer"

	// Prometheus scrapes metrics and evaluates rules.
	Prometheus Kind = "prometheus"
)

const (
	startPatience = 2 * time.Minute
	stopPatience  = Patience
)

// engine is the product-specific part of a server.
type engine interface {
	// prepare fills the empty folder dir. It is called once.
	prepare(ctx context.Context, dir string) error
	// command returns the server's process, ready to start. The server may be started again after it ended.
	command() *exec.Cmd
	// stopSignal asks for a clean shutdown that does not wait for clients.
	stopSignal() syscall.Signal
	url() string
	adminURL() string
	// close ends helpers that outlive the server's own process.
	close() error
}

// Server is one private server process. Its folder and ports stay the same across restarts. Its methods may be
// called from any goroutine.
type Server struct {
	kind   Kind
	dir    string
	env    []string
	enter  func() error // of its Host
	engine engine

	mu     sync.Mutex
	proc   *process // nil before the first start
	asked  bool     // the newest process was asked to stop
	closed bool
}

// Ping returns nil if a server answers its clients: at url, and for RabbitMQ also its management API at adminURL.
func Ping(ctx context.Context, kind Kind, url, adminURL string) error {
	switch kind {
	case Postgres, PgBouncer:
		return pingPostgres(ctx, url)
	case Redis:
		return pingRedis(ctx, url)
	case RabbitMQ:
		return errors.Join(pingRabbitMQ(ctx, url), pingManagement(ctx, adminURL))
	case NATS:
		return pingNATS(ctx, url)
	case Prometheus:
		return pingPrometheus(ctx, url)
	default:
		return fmt.Errorf("testenv: unknown kind %q", kind)
	}
}

// Kind returns the server's product.
func (s *Server) Kind() Kind { return s.kind }

// URL returns the address for clients, with credentials.
func (s *Server) URL() string { return s.engine.url() }

// AdminURL returns the base of RabbitMQ's management API, with credentials; empty for other kinds.
func (s *Server) AdminURL() string { return s.engine.adminURL() }

// Start starts the stopped server and returns when it answers. On a running server it does nothing.
func (s *Server) Start(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.start(ctx)
}

func (s *Server) start(ctx context.Context) error {
	if s.closed {
		return fmt.Errorf("testenv: start %s: closed", s.kind)
	}
	if s.proc != nil && !s.proc.ended() {
		return nil
	}
	log, err := os.OpenFile(s.logPath(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return fmt.Errorf("testenv: start %s: %w", s.kind, err)
	}
	defer log.Close()
	cmd := s.engine.command()
	cmd.Stdout, cmd.Stderr = log, log
	if len(s.env) > 0 {
		cmd.Env = append(cmd.Environ(), s.env...)
	}
	if s.proc, err = startProcess(cmd, s.enter); err != nil {
		return fmt.Errorf("testenv: start %s: %w", s.kind, err)
	}
	s.asked = false
	return s.awaitReady(ctx)
}

func (s *Server) awaitReady(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, startPatience)
	defer cancel()
	for {
		attempt, done := context.WithTimeout(ctx, 2*time.Second) // timing: it tries again
		err := Ping(attempt, s.kind, s.URL(), s.AdminURL())
		done()
		if err == nil && !s.proc.ended() { // else another server answers at this port
			return nil
		}
		select {
		case <-s.proc.done:
			return fmt.Errorf("testenv: %s ended during start (%s); its log:\n%s", s.kind, s.proc.verdict(), s.Log())
		case <-ctx.Done():
			return fmt.Errorf("testenv: %s does not answer: %w; its log:\n%s", s.kind, err, s.Log())
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// Stop shuts the server down cleanly and drops its clients. A server that needs longer than Patience is killed.
func (s *Server) Stop() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.proc == nil {
		return nil
	}
	s.asked = true
	return s.wrap("stop", s.proc.terminate(s.engine.stopSignal(), stopPatience))
}

// Kill ends the server's processes with SIGKILL and returns when they are gone.
func (s *Server) Kill() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.proc == nil {
		return nil
	}
	s.asked = true
	return s.wrap("kill", s.proc.kill())
}

// Crashed reports whether the server ended without Stop or Kill. Start starts it again.
func (s *Server) Crashed() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.proc != nil && s.proc.ended() && !s.asked && !s.closed
}

// Pause freezes the server's processes: connections stay open, and the system still accepts new ones, but nothing
// answers.
func (s *Server) Pause() error { return s.signal("pause", syscall.SIGSTOP) }

// Resume continues a paused server.
func (s *Server) Resume() error { return s.signal("resume", syscall.SIGCONT) }

func (s *Server) signal(what string, sig syscall.Signal) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.proc == nil || s.proc.ended() {
		return fmt.Errorf("testenv: %s %s: not running", what, s.kind)
	}
	_, err := signalTree(s.proc.pid, sig)
	return s.wrap(what, err)
}

// Restart stops the server cleanly if it runs, starts it on the same ports and data, and returns when it answers.
func (s *Server) Restart(ctx context.Context) error {
	if err := s.Stop(); err != nil {
		return err
	}
	return s.Start(ctx)
}

// Control runs rabbitmqctl, for example to raise an alarm. The server must be a running RabbitMQ.
func (s *Server) Control(ctx context.Context, args ...string) error {
	r, ok := s.engine.(*rabbitmq)
	if !ok {
		return fmt.Errorf("testenv: control %s: only RabbitMQ has rabbitmqctl", s.kind)
	}
	if out, err := r.host.run(r.control(ctx, args)); err != nil {
		return fmt.Errorf("testenv: rabbitmqctl %s: %w\n%s", strings.Join(args, " "), err, out)
	}
	return nil
}

// WriteDefinitions makes a RabbitMQ flush its queues and users to disk. RabbitMQ confirms a definition before it is
// on disk. If it is killed then, a quorum queue can come back without its log and never confirm a message again,
// and a new server can come back without its user.
func (s *Server) WriteDefinitions(ctx context.Context) error {
	return s.Control(ctx, "eval", "[dets:sync(T) || T <- dets:all()], catch mnesia:sync_log().")
}

// Close kills the server and removes its folder. It may be called more than once.
func (s *Server) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil
	}
	s.closed = true
	live.remove(s)
	var errs []error
	if s.proc != nil {
		errs = append(errs, s.proc.kill())
	}
	errs = append(errs, s.engine.close(), os.RemoveAll(s.dir))
	return s.wrap("close", errors.Join(errs...))
}

func (s *Server) wrap(what string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("testenv: %s %s: %w", what, s.kind, err)
}

func (s *Server) logPath() string { return filepath.Join(s.dir, "server.log") }

// Log returns the end of the server's log.
func (s *Server) Log() string {
	const most = 30
	text, err := os.ReadFile(s.logPath())
	if err != nil {
		return err.Error()
	}
	lines := strings.Split(strings.TrimRight(string(text), "\n"), "\n")
	return strings.Join(lines[max(0, len(lines)-most):], "\n")
}
