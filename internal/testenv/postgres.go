package testenv

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"syscall"

	"github.com/jackc/pgx/v5"
)

// postgres is an instance of PostgreSQL. It keeps fsync and synchronous_commit
// on: what a test sees committed must be as durable as in production.
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

// admitHosts lets other hosts in, as clients and as standbys.
func (p *postgres) admitHosts() error {
	rules, err := os.OpenFile(filepath.Join(p.data(), "pg_hba.conf"), os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = rules.WriteString("host all all all trust\nhost replication all all trust\n")
	return errors.Join(err, rules.Close())
}

// unprivileged gives the folder to a user who is not root, if this process is, and returns how a
// process runs as that one.
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
		"-c", "max_pred_locks_per_transaction=256", // what txretry.Manager.Check wants
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
