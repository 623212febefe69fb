package testenv

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"
)

// ErrNotInstalled is returned by Launch when the machine lacks the server's binaries.
var ErrNotInstalled = errors.New("testenv: not installed")

// Kind names a server product.
type Kind string

// The servers Launch and Private can start.
const (
	Postgres Kind = "postgres"
	Redis    Kind = "redis"
	RabbitMQ Kind = "rabbitmq"

	// PgBouncer pools the connections of another server.
	PgBouncer Kind = "pgbouncer"

	// Prometheus scrapes and evaluates.
	Prometheus Kind = "prometheus"
)

const (
	startPatience = 2 * time.Minute
	stopPatience  = Patience
)

// engine is what differs from product to product.
type engine interface {
	// prepare lays out the empty folder dir, once.
	prepare(ctx context.Context, dir string) error
	// command is the server's process, ready to start; it may be started again after it ended.
	command() *exec.Cmd
	// stopSignal asks for a clean shutdown that does not wait for clients.
	stopSignal() syscall.Signal
	url() string
	adminURL() string
	// close ends helpers that outlive the server's own process.
	close() error
}

// Server is one private server process with its folder and ports, which stay
// the same over restarts. Its methods may be called from any goroutine.
type Server struct {
	kind   Kind
	dir    string
	env    []string
	enter  func() error // of its Host
	engine engine

	mu     sync.Mutex
	proc   *process // nil before the first start
	asked  bool     // the newest process was asked to end
	closed bool
}

// Ping returns nil when a server answers its clients: at url, and for RabbitMQ its management API at adminURL.
func Ping(ctx context.Context, kind Kind, url, adminURL string) error {
	switch kind {
	case Postgres, PgBouncer:
		return pingPostgres(ctx, url)
	case Redis:
		return pingRedis(ctx, url)
	case RabbitMQ:
		return errors.Join(pingRabbitMQ(ctx, url), pingManagement(ctx, adminURL))
	case Prometheus:
		return pingPrometheus(ctx, url)
	default:
		return fmt.Errorf("testenv: unknown kind %q", kind)
	}
}

// Kind returns what product the server is.
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
			return fmt.Errorf("testenv: %s ended at start (%s); its log:\n%s", s.kind, s.proc.verdict(), s.Log())
		case <-ctx.Done():
			return fmt.Errorf("testenv: %s does not answer: %w; its log:\n%s", s.kind, err, s.Log())
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// Stop shuts the server down cleanly, dropping its clients. A server that takes
// longer than Patience is killed.
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

// Crashed reports whether the server has ended by itself: it was not stopped or killed here. Start starts it again.
func (s *Server) Crashed() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.proc != nil && s.proc.ended() && !s.asked && !s.closed
}

// Pause freezes the server's processes: connections stay open and the system
// still accepts new ones, but nothing answers.
func (s *Server) Pause() error { return s.signal("pause", syscall.SIGSTOP) }

// Resume lets a paused server go on.
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

// Restart stops the server cleanly if it runs, starts it on the same ports and
// data, and returns when it answers.
func (s *Server) Restart(ctx context.Context) error {
	if err := s.Stop(); err != nil {
		return err
	}
	return s.Start(ctx)
}

// Control runs rabbitmqctl, such as for an alarm. The server must be a RabbitMQ that runs.
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

// WriteDefinitions has a RabbitMQ write to its disk which queues and users there are. It confirms a
// definition before that: when it is killed then, a quorum queue can come back without its log and never
// confirm a message again, and a server that is new can come back without its user.
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

// Log is the end of what the server has logged.
func (s *Server) Log() string {
	const most = 30
	text, err := os.ReadFile(s.logPath())
	if err != nil {
		return err.Error()
	}
	lines := strings.Split(strings.TrimRight(string(text), "\n"), "\n")
	return strings.Join(lines[max(0, len(lines)-most):], "\n")
}
