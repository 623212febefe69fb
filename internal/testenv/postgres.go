package testenv

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	goredis "github.com/redis/go-redis/v9"
)

// postgres is an instance of PostgreSQL. It keeps fsync and synchronous_commit on, so that commits are as
// durable as in production.
type postgres struct {
	bin  string // folder of initdb and postgres
	dir  string
	port int
	spec Spec
	attr *syscall.SysProcAttr // PostgreSQL refuses to run as root
}

func newPostgres(spec Spec) (engine, error) {
	bin, err := findPostgres()
	if err != nil {
		return nil, err
	}
	port, err := FreePort()
	if err != nil {
		return nil, err
	}
	if spec.Host.apart() { // an address that moves to another host keeps its port
		port = 5432
	}
	return &postgres{bin: bin, port: port, spec: spec}, nil
}

func (p *postgres) prepare(ctx context.Context, dir string) (err error) {
	p.dir = dir
	if p.attr, err = unprivileged(dir); err != nil {
		return err
	}
	name, args := "initdb", []string{
		"--pgdata", p.data(), "--username=postgres", "--auth=trust", "--encoding=UTF8", "--locale=C", "--no-sync",
	}
	if p.spec.Follows != "" {
		name, args = "pg_basebackup", []string{
			"--pgdata", p.data(), "--dbname", p.spec.Follows, "--write-recovery-conf", "--checkpoint=fast", "--no-sync",
		}
	}
	cmd := exec.CommandContext(ctx, filepath.Join(p.bin, name), args...)
	cmd.Dir, cmd.SysProcAttr = dir, p.attr
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w\n%s", name, err, out)
	}
	if p.spec.Host.apart() && p.spec.Follows == "" {
		return p.admitHosts()
	}
	return nil
}

// admitHosts allows other hosts to connect, as clients and as standbys.
func (p *postgres) admitHosts() error {
	rules, err := os.OpenFile(filepath.Join(p.data(), "pg_hba.conf"), os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = rules.WriteString("host all all all trust\nhost replication all all trust\n")
	return errors.Join(err, rules.Close())
}

// unprivileged gives the folder to a non-root user if this process is root. It returns the attributes for
// running a process as that user.
func unprivileged(dir string) (*syscall.SysProcAttr, error) {
	if os.Geteuid() != 0 {
		return nil, nil
	}
	account, err := user.Lookup("postgres")
	if err != nil {
		account, err = user.Lookup("nobody")
	}
	if err != nil {
		return nil, err
	}
	uid, err1 := strconv.Atoi(account.Uid)
	gid, err2 := strconv.Atoi(account.Gid)
	if err := errors.Join(err1, err2); err != nil {
		return nil, err
	}
	attr := &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}}
	return attr, os.Chown(dir, uid, gid)
}

func (p *postgres) command() *exec.Cmd {
	cmd := exec.Command(filepath.Join(p.bin, "postgres"), append([]string{
		"-D", p.data(),
		"-p", strconv.Itoa(p.port),
		"-c", "listen_addresses=" + p.spec.Host.address(),
		"-c", "unix_socket_directories=" + p.dir,
		"-c", "max_connections=300",
		"-c", "max_pred_locks_per_transaction=256", // required by txretry.Manager.Check
	}, p.spec.Extra...)...)
	cmd.Dir = p.dir
	if p.attr != nil {
		attr := *p.attr
		cmd.SysProcAttr = &attr
	}
	return cmd
}

func pingPostgres(ctx context.Context, url string) error {
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		return err
	}
	return errors.Join(conn.Ping(ctx), conn.Close(ctx))
}

// stopSignal is PostgreSQL's fast shutdown.
func (p *postgres) stopSignal() syscall.Signal { return syscall.SIGINT }

func (p *postgres) url() string {
	return fmt.Sprintf("postgres://postgres@%s/postgres?sslmode=disable", p.spec.Host.at(p.port))
}

func (p *postgres) adminURL() string { return "" }
func (p *postgres) close() error     { return nil }
func (p *postgres) data() string     { return filepath.Join(p.dir, "data") }

// Promote makes a server that was started with Spec.Follows a primary, and returns when it accepts writes.
// After a restart it is still a primary.
func (s *Server) Promote(ctx context.Context) error {
	switch e := s.engine.(type) {
	case *postgres:
		return s.wrap("promote", promotePostgres(ctx, s.URL()))
	case *redis:
		s.mu.Lock()
		e.spec.Follows = "" // else it would follow again after a restart
		s.mu.Unlock()
		return s.wrap("promote", promoteRedis(ctx, s.URL()))
	default:
		return fmt.Errorf("testenv: promote %s: it is not a standby or replica", s.kind)
	}
}

func promotePostgres(ctx context.Context, url string) error {
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		return err
	}
	_, err = conn.Exec(ctx, "SELECT pg_promote()") // it waits
	return errors.Join(err, conn.Close(ctx))
}

func promoteRedis(ctx context.Context, url string) error {
	opts, err := goredis.ParseURL(url)
	if err != nil {
		return err
	}
	client := goredis.NewClient(opts)
	return errors.Join(client.SlaveOf(ctx, "NO", "ONE").Err(), client.Close())
}

// pgbouncer is an instance of PgBouncer in transaction mode, in front of one Postgres. If possible, each
// transaction gets a different server connection than the transaction before. Session settings and prepared
// statements are then missing, or belong to another client.
type pgbouncer struct {
	bin    string
	dir    string
	port   int
	server *pgconn.Config
	host   Host
	extra  []string             // lines of its configuration; they take precedence
	attr   *syscall.SysProcAttr // PgBouncer refuses to run as root
}

// newPgBouncer takes the address of the Postgres and lines of pgbouncer.ini.
func newPgBouncer(spec Spec) (engine, error) {
	bin, err := findPgBouncer()
	if err != nil {
		return nil, err
	}
	if len(spec.Extra) == 0 {
		return nil, fmt.Errorf("testenv: %s: the address of its Postgres is missing", PgBouncer)
	}
	server, err := pgconn.ParseConfig(spec.Extra[0])
	if err != nil {
		return nil, fmt.Errorf("testenv: %s: %w", PgBouncer, err)
	}
	port, err := FreePort()
	if err != nil {
		return nil, err
	}
	return &pgbouncer{bin: bin, port: port, server: server, host: spec.Host, extra: spec.Extra[1:]}, nil
}

func (p *pgbouncer) prepare(_ context.Context, dir string) (err error) {
	p.dir = dir
	if p.attr, err = unprivileged(dir); err != nil {
		return err
	}
	return os.WriteFile(p.ini(), []byte(p.configuration()), 0o644)
}

// configuration allows every client to connect, as the one user in the server's address.
func (p *pgbouncer) configuration() string {
	lines := append([]string{
		"[databases]", "* = " + p.database(),
		"[pgbouncer]",
		"listen_addr = " + p.host.address(), fmt.Sprint("listen_port = ", p.port), "unix_socket_dir =",
		"auth_type = any",
		"pool_mode = transaction", "server_round_robin = 1", "default_pool_size = 20", "max_client_conn = 1000",
	}, p.extra...)
	return strings.Join(lines, "\n") + "\n"
}

// database returns PgBouncer's connection to the server. Clients cannot set session parameters such as
// search_path, because PgBouncer rejects parameters that it does not know. The parameters of the address
// are set here instead.
func (p *pgbouncer) database() string {
	settings := []string{
		"host=" + p.server.Host, fmt.Sprint("port=", p.server.Port), "user=" + quoted(p.server.User),
	}
	if p.server.Password != "" {
		settings = append(settings, "password="+quoted(p.server.Password))
	}
	var set []string
	for _, name := range slices.Sorted(maps.Keys(p.server.RuntimeParams)) {
		set = append(set, fmt.Sprintf("SET %s TO %s", pgx.Identifier{name}.Sanitize(), quoted(p.server.RuntimeParams[name])))
	}
	if len(set) > 0 {
		settings = append(settings, "connect_query="+quoted(strings.Join(set, "; ")))
	}
	return strings.Join(settings, " ")
}

// quoted quotes a text the way PgBouncer and SQL both do.
func quoted(text string) string { return "'" + strings.ReplaceAll(text, "'", "''") + "'" }

func (p *pgbouncer) command() *exec.Cmd {
	cmd := exec.Command(p.bin, p.ini())
	cmd.Dir = p.dir
	if p.attr != nil {
		attr := *p.attr
		cmd.SysProcAttr = &attr
	}
	return cmd
}

// stopSignal stops every version at once. From 1.23 on, SIGTERM waits for the clients.
func (p *pgbouncer) stopSignal() syscall.Signal { return syscall.SIGQUIT }

func (p *pgbouncer) url() string {
	return fmt.Sprintf("postgres://%s@%s/%s?sslmode=disable", p.server.User, p.host.at(p.port), p.server.Database)
}

func (p *pgbouncer) adminURL() string { return "" }
func (p *pgbouncer) close() error     { return nil }
func (p *pgbouncer) ini() string      { return filepath.Join(p.dir, "pgbouncer.ini") }

// detachedImage is the image that Detached runs if only Docker is available.
const detachedImage = "postgres:17-alpine"

// supervise runs a server until the other end of its input closes. The system closes it when the process at
// that end exits, for any reason. Then the script stops the server and removes its folder.
const supervise = `"$@" & server=$!
cat >/dev/null
kill -INT $server 2>/dev/null
wait $server
rm -rf "$HOLDFAST_SERVER_DIR"`

// Detached starts a Postgres that lives as long as this process, and returns its address. It uses an
// installed binary, or a container if Docker answers, or returns ErrNotInstalled. There is nothing to
// close, and no goroutine is left.
func Detached(ctx context.Context) (url string, err error) {
	ctx, cancel := context.WithTimeout(ctx, startPatience)
	defer cancel()
	dir, err := os.MkdirTemp("", "holdfast-")
	if err != nil {
		return "", fmt.Errorf("testenv: %w", err)
	}
	cmd, url, err := installed(ctx, dir)
	if errors.Is(err, ErrNotInstalled) {
		cmd, url, err = contained(ctx, err)
	}
	if err == nil {
		err = startSupervised(ctx, cmd, dir, url)
	}
	if err != nil {
		return "", errors.Join(fmt.Errorf("testenv: postgres: %w", err), os.RemoveAll(dir))
	}
	return url, nil
}

// installed returns the command for an instance of the installed binary.
func installed(ctx context.Context, dir string) (*exec.Cmd, string, error) {
	e, err := newPostgres(Spec{})
	if err != nil {
		return nil, "", err
	}
	if err := e.prepare(ctx, dir); err != nil {
		return nil, "", err
	}
	return e.command(), e.url(), nil
}

// contained returns the command for a container, or the error missing if Docker does not answer.
func contained(ctx context.Context, missing error) (*exec.Cmd, string, error) {
	docker, err := exec.LookPath("docker")
	if err != nil {
		return nil, "", missing
	}
	asked, cancel := context.WithTimeout(ctx, 5*time.Second) // timing: a Docker that does not answer counts as missing
	defer cancel()
	if exec.CommandContext(asked, docker, "info").Run() != nil {
		return nil, "", missing
	}
	port, err := FreePort()
	if err != nil {
		return nil, "", err
	}
	cmd := exec.Command(docker, "run", "--rm", "--publish", "127.0.0.1:"+strconv.Itoa(port)+":5432",
		"--env", "POSTGRES_HOST_AUTH_METHOD=trust", detachedImage,
		"-c", "max_connections=300", "-c", "max_pred_locks_per_transaction=256")
	return cmd, fmt.Sprintf("postgres://postgres@127.0.0.1:%d/postgres?sslmode=disable", port), nil
}

// inputs are kept open as long as the process lives.
var inputs struct {
	sync.Mutex
	open []*os.File
}

// startSupervised starts the server and returns when it answers.
func startSupervised(ctx context.Context, server *exec.Cmd, dir, url string) error {
	log, err := os.OpenFile(filepath.Join(dir, "server.log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	defer log.Close()
	stdin, input, err := os.Pipe()
	if err != nil {
		return err
	}
	defer stdin.Close()
	cmd := exec.Command("sh", append([]string{"-c", supervise, "sh"}, server.Args...)...)
	cmd.Dir, cmd.Stdin, cmd.Stdout, cmd.Stderr = dir, stdin, log, log
	cmd.Env = append(os.Environ(), "HOLDFAST_SERVER_DIR="+dir)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // an interrupt at the terminal should reach the tests only
	if server.SysProcAttr != nil {
		cmd.SysProcAttr.Credential = server.SysProcAttr.Credential
	}
	if err := cmd.Start(); err != nil {
		return errors.Join(err, input.Close())
	}
	if err := awaitAnswer(ctx, url); err != nil {
		text, _ := os.ReadFile(log.Name())
		return errors.Join(fmt.Errorf("does not answer: %w; its log:\n%s", err, text), input.Close(), cmd.Wait())
	}
	inputs.Lock()
	defer inputs.Unlock()
	inputs.open = append(inputs.open, input)
	return cmd.Process.Release()
}

func awaitAnswer(ctx context.Context, url string) error {
	for {
		attempt, done := context.WithTimeout(ctx, 2*time.Second) // timing: it tries again
		err := pingPostgres(attempt, url)
		done()
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(50 * time.Millisecond):
		}
	}
}
