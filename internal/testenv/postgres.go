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
	bin   string // folder of initdb and postgres
	dir   string
	port  int
	extra []string
	// follows is the address of the primary of a standby.
	follows string
	attr    *syscall.SysProcAttr // PostgreSQL refuses to run as root
}

func newPostgres(extra []string, follows string) (engine, error) {
	bin, err := findPostgres()
	if err != nil {
		return nil, err
	}
	port, err := FreePort()
	if err != nil {
		return nil, err
	}
	return &postgres{bin: bin, port: port, extra: extra, follows: follows}, nil
}

func (p *postgres) prepare(ctx context.Context, dir string) (err error) {
	p.dir = dir
	if p.attr, err = unprivileged(dir); err != nil {
		return err
	}
	name, args := "initdb", []string{
		"--pgdata", p.data(), "--username=postgres", "--auth=trust", "--encoding=UTF8", "--locale=C", "--no-sync",
	}
	if p.follows != "" {
		name, args = "pg_basebackup", []string{
			"--pgdata", p.data(), "--dbname", p.follows, "--write-recovery-conf", "--checkpoint=fast", "--no-sync",
		}
	}
	cmd := exec.CommandContext(ctx, filepath.Join(p.bin, name), args...)
	cmd.Dir, cmd.SysProcAttr = dir, p.attr
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w\n%s", name, err, out)
	}
	return nil
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
		"-c", "listen_addresses=127.0.0.1",
		"-c", "unix_socket_directories=" + p.dir,
		"-c", "max_connections=300",
		"-c", "max_pred_locks_per_transaction=256", // what txretry.Manager.Check wants
	}, p.extra...)...)
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
	return fmt.Sprintf("postgres://postgres@127.0.0.1:%d/postgres?sslmode=disable", p.port)
}

func (p *postgres) adminURL() string { return "" }
func (p *postgres) close() error     { return nil }
func (p *postgres) data() string     { return filepath.Join(p.dir, "data") }
