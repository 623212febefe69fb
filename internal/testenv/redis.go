package testenv

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"os/exec"
	"strconv"
	"syscall"

	goredis "github.com/redis/go-redis/v9"
)

// redis is an instance of Redis that keeps nothing on disk unless its extra arguments say so.
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
