package testenv

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"

	goredis "github.com/redis/go-redis/v9"
)

// findPostgres returns the folder with initdb and postgres, of the newest installed version.
func findPostgres() (string, error) {
	servers := newestFirst("/usr/lib/postgresql/*/bin/postgres", "/usr/pgsql-*/bin/postgres",
		"/opt/homebrew/opt/postgresql@*/bin/postgres", "/usr/local/opt/postgresql@*/bin/postgres")
	if path, err := exec.LookPath("postgres"); err == nil {
		servers = append(servers, path)
	}
	for _, server := range servers {
		dir := filepath.Dir(server)
		if _, err := exec.LookPath(filepath.Join(dir, "initdb")); err == nil {
			return dir, nil
		}
	}
	return "", fmt.Errorf("%w: PostgreSQL (initdb, postgres)", ErrNotInstalled)
}

// PgBouncerInstalled reports whether this machine has a PgBouncer that Private can start.
func PgBouncerInstalled() bool {
	_, err := findPgBouncer()
	return err == nil
}

func findPgBouncer() (string, error) {
	for _, name := range []string{"pgbouncer", "/usr/sbin/pgbouncer", "/opt/homebrew/bin/pgbouncer", "/usr/local/bin/pgbouncer"} {
		if path, err := exec.LookPath(name); err == nil {
			return path, nil
		}
	}
	return "", fmt.Errorf("%w: PgBouncer (pgbouncer)", ErrNotInstalled)
}

// PrometheusInstalled reports whether this machine has a Prometheus that Private can start, and promtool.
func PrometheusInstalled() bool {
	_, err := findPrometheus()
	return err == nil
}

func findPrometheus() (string, error) {
	path, err := exec.LookPath("prometheus")
	if err == nil {
		_, err = exec.LookPath("promtool")
	}
	if err != nil {
		return "", fmt.Errorf("%w: Prometheus (prometheus, promtool)", ErrNotInstalled)
	}
	return path, nil
}

func findRedis() (string, error) {
	for _, name := range []string{"redis-server", "valkey-server"} {
		if path, err := exec.LookPath(name); err == nil {
			return path, nil
		}
	}
	return "", fmt.Errorf("%w: Redis (redis-server)", ErrNotInstalled)
}

// findRabbitMQ returns the server's own start script and epmd. The wrapper that Debian puts into the PATH would
// switch to another user and folder, so it comes last.
func findRabbitMQ() (script, epmd string, err error) {
	scripts := newestFirst("/usr/lib/rabbitmq/lib/rabbitmq_server-*/sbin/rabbitmq-server")
	for _, name := range []string{"rabbitmq-server", "/opt/homebrew/sbin/rabbitmq-server", "/usr/local/sbin/rabbitmq-server"} {
		if path, err := exec.LookPath(name); err == nil {
			scripts = append(scripts, path)
		}
	}
	mappers := newestFirst("/usr/lib/erlang/erts-*/bin/epmd", "/usr/local/lib/erlang/erts-*/bin/epmd")
	if path, err := exec.LookPath("epmd"); err == nil {
		mappers = slices.Insert(mappers, 0, path)
	}
	if len(scripts) == 0 || len(mappers) == 0 {
		return "", "", fmt.Errorf("%w: RabbitMQ (rabbitmq-server, epmd)", ErrNotInstalled)
	}
	return scripts[0], mappers[0], nil
}

func findNATS() (string, error) {
	for _, name := range []string{"nats-server", "/usr/sbin/nats-server", "/opt/homebrew/bin/nats-server"} {
		if path, err := exec.LookPath(name); err == nil {
			return path, nil
		}
	}
	return "", fmt.Errorf("%w: NATS (nats-server)", ErrNotInstalled)
}

// ServersMissing returns the Debian packages of the missing servers: Postgres, Redis and RabbitMQ.
func ServersMissing() []string {
	var packages []string
	if _, err := findPostgres(); err != nil {
		packages = append(packages, "postgresql")
	}
	if _, err := findRedis(); err != nil {
		packages = append(packages, "redis-server")
	}
	if _, _, err := findRabbitMQ(); err != nil {
		packages = append(packages, "rabbitmq-server")
	}
	return packages
}

// newestFirst returns the files that match the patterns, the highest version in the path first.
func newestFirst(patterns ...string) []string {
	var found []string
	for _, pattern := range patterns {
		matches, err := filepath.Glob(pattern)
		if err == nil { // the only error is a malformed pattern
			found = append(found, matches...)
		}
	}
	slices.SortStableFunc(found, func(a, b string) int {
		return slices.CompareFunc(versionIn(b), versionIn(a), cmp.Compare)
	})
	return found
}

// versionIn returns the numbers in a path, such as 15 or 3, 10, 8.
func versionIn(path string) []int {
	var version []int
	for _, digits := range strings.FieldsFunc(path, func(r rune) bool { return r < '0' || r > '9' }) {
		if n, err := strconv.Atoi(digits); err == nil {
			version = append(version, n)
		}
	}
	return version
}

// Ports come from below the range that systems use for outgoing connections. A port inside that range may be taken
// by a client while its server is down, and a client that dials it may even connect to itself.
const (
	firstPort = 16000
	lastPort  = 25600
)

var reserved = struct {
	sync.Mutex
	ports map[int]net.Listener // kept open; nil if the system has no abstract sockets
}{ports: map[int]net.Listener{}}

// FreePort returns a loopback port that nobody listens on, and never the same one twice.
func FreePort() (int, error) {
	for range 1000 {
		port := firstPort + rand.IntN(lastPort-firstPort)
		if !reserve(port) {
			continue
		}
		l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port))
		if err != nil {
			continue
		}
		return port, l.Close()
	}
	return 0, errors.New("testenv: no free port")
}

// reserve reports whether it has reserved the port for this process. Other tests must not take the port while its
// server is down: the server could not start again, or their server would be mistaken for it. On Linux an abstract
// socket reserves the port across processes, until this process ends.
func reserve(port int) bool {
	reserved.Lock()
	defer reserved.Unlock()
	if _, taken := reserved.ports[port]; taken {
		return false
	}
	var l net.Listener
	if runtime.GOOS == "linux" {
		var err error
		if l, err = net.Listen("unix", fmt.Sprintf("@holdfast-port-%d", port)); err != nil {
			return false
		}
	}
	reserved.ports[port] = l
	return true
}

// portTaken reports whether a server could not start because another process took its port first.
func portTaken(err error) bool {
	text := strings.ToLower(err.Error())
	return strings.Contains(text, "in use") || strings.Contains(text, "eaddrinuse")
}

// redis is an instance of Redis that stores nothing on disk unless its extra arguments enable that.
type redis struct {
	bin  string
	dir  string
	port int
	spec Spec
}

func newRedis(spec Spec) (engine, error) {
	bin, err := findRedis()
	if err != nil {
		return nil, err
	}
	port, err := FreePort()
	if err != nil {
		return nil, err
	}
	return &redis{bin: bin, port: port, spec: spec}, nil
}

func (r *redis) prepare(_ context.Context, dir string) error {
	r.dir = dir
	return nil
}

func (r *redis) command() *exec.Cmd {
	args := []string{
		"--bind", r.spec.Host.address(), "--protected-mode", "no",
		"--port", strconv.Itoa(r.port),
		"--dir", r.dir,
		"--databases", "4096",
		"--save", "",
		"--appendonly", "no",
	}
	if primary, err := url.Parse(r.spec.Follows); err == nil && r.spec.Follows != "" {
		args = append(args, "--replicaof", primary.Hostname(), primary.Port())
	}
	cmd := exec.Command(r.bin, append(args, r.spec.Extra...)...)
	cmd.Dir = r.dir
	return cmd
}

func pingRedis(ctx context.Context, url string) error {
	opts, err := goredis.ParseURL(url)
	if err != nil {
		return err
	}
	opts.MaxRetries = -1
	client := goredis.NewClient(opts)
	return errors.Join(client.Ping(ctx).Err(), client.Close())
}

func (r *redis) stopSignal() syscall.Signal { return syscall.SIGTERM }
func (r *redis) url() string                { return fmt.Sprintf("redis://%s/0", r.spec.Host.at(r.port)) }
func (r *redis) adminURL() string           { return "" }
func (r *redis) close() error               { return nil }

// prometheus is an instance of Prometheus.
type prometheus struct {
	bin    string
	dir    string
	port   int
	config string
}

// newPrometheus makes a Prometheus. extra are the lines of prometheus.yml.
func newPrometheus(extra []string) (engine, error) {
	bin, err := findPrometheus()
	if err != nil {
		return nil, err
	}
	port, err := FreePort()
	if err != nil {
		return nil, err
	}
	return &prometheus{bin: bin, port: port, config: strings.Join(extra, "\n") + "\n"}, nil
}

func (p *prometheus) prepare(_ context.Context, dir string) error {
	p.dir = dir
	return os.WriteFile(p.file(), []byte(p.config), 0o600)
}

func (p *prometheus) command() *exec.Cmd {
	cmd := exec.Command(p.bin,
		"--config.file="+p.file(),
		"--storage.tsdb.path="+filepath.Join(p.dir, "data"),
		fmt.Sprintf("--web.listen-address=127.0.0.1:%d", p.port))
	cmd.Dir = p.dir
	return cmd
}

// pingPrometheus returns nil if the server has read its configuration and answers queries.
func pingPrometheus(ctx context.Context, url string) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url+"/-/ready", nil)
	if err != nil {
		return err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	_, _ = io.Copy(io.Discard, io.LimitReader(resp.Body, 4096)) // so that the connection can be reused
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("Prometheus answers %s", resp.Status)
	}
	return nil
}

func (p *prometheus) stopSignal() syscall.Signal { return syscall.SIGTERM }
func (p *prometheus) url() string                { return fmt.Sprintf("http://127.0.0.1:%d", p.port) }
func (p *prometheus) adminURL() string           { return "" }
func (p *prometheus) close() error               { return nil }
func (p *prometheus) file() string               { return filepath.Join(p.dir, "prometheus.yml") }
