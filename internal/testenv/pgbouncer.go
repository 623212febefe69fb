package testenv

import (
	"context"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// pgbouncer is an instance of PgBouncer in transaction mode, in front of one Postgres. Each
// transaction gets another of its connections there than the one before, as far as there are others:
// what a session has set or prepared is then missing, or somebody else's.
type pgbouncer struct {
	bin    string
	dir    string
	port   int
	server *pgconn.Config
	host   Host
	extra  []string             // lines of its configuration, which win
	attr   *syscall.SysProcAttr // PgBouncer refuses to run as root
}

// newPgBouncer takes the address of the Postgres, and lines of pgbouncer.ini.
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

// configuration lets everybody in, as the one user that the server's address names.
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

// database is how PgBouncer connects. Clients cannot choose parameters of the session, such as
// search_path, since PgBouncer refuses those it does not know: those of the address are set here.
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

// quoted is a text as PgBouncer and SQL both write it.
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

// stopSignal ends every version at once; from 1.23 on SIGTERM waits for the clients.
func (p *pgbouncer) stopSignal() syscall.Signal { return syscall.SIGQUIT }

func (p *pgbouncer) url() string {
	return fmt.Sprintf("postgres://%s@%s/%s?sslmode=disable", p.server.User, p.host.at(p.port), p.server.Database)
}

func (p *pgbouncer) adminURL() string { return "" }
func (p *pgbouncer) close() error     { return nil }
func (p *pgbouncer) ini() string      { return filepath.Join(p.dir, "pgbouncer.ini") }
