package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/holdfast-go/holdfast/internal/testenv"
)

// address is the address of one server.
type address struct{ url, adminURL string }

// need is a server that the tests need.
type need struct {
	kind       testenv.Kind
	vars       []string // the address, then the admin address
	container  container
	aptPackage string
	extra      []string // for testenv.Launch
}

// notDurable turns off durability in the shared Postgres, which only matters if the machine crashes. Tests of crashes
// have private servers.
var notDurable = []string{"-c", "fsync=off", "-c", "full_page_writes=off"}

var needs = []need{
	{testenv.Postgres, []string{testenv.PostgresVar}, postgresContainer, "postgresql", notDurable},
	{testenv.Redis, []string{testenv.RedisVar}, redisContainer, "redis-server", nil},
	{testenv.RabbitMQ, []string{testenv.AMQPVar, testenv.AMQPAdminVar}, rabbitContainer, "rabbitmq-server", nil},
	{testenv.NATS, []string{testenv.NATSVar}, natsContainer, "nats-server", nil},
}

// rung starts servers in one way. It returns the needs that it cannot start as missing.
type rung func(ctx context.Context, needs []need, started *closers) (env []string, missing []need, err error)

// closers collects clean-up functions, from several goroutines.
type closers struct {
	mu  sync.Mutex
	all []func() error
}

func (c *closers) add(f func() error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.all = append(c.all, f)
}

func (c *closers) close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	errs := make([]error, len(c.all))
	var wg sync.WaitGroup
	for i, f := range c.all {
		wg.Go(func() { errs[i] = f() })
	}
	wg.Wait()
	return errors.Join(errs...)
}

// startServers starts the servers and returns the environment variables with their addresses. closeAll also ends
// servers that were started before an error.
func startServers(ctx context.Context) (env []string, closeAll func() error, err error) {
	var started closers
	missing := slices.DeleteFunc(slices.Clone(needs), given)
	if !given(needs[0]) { // a given Postgres has its own machine
		getTools(ctx)
	}
	env = append(browserEnv(), testenv.PrivateVar+"=1")
	for _, rung := range []rung{fromBinaries, fromContainers, fromPackages} {
		if len(missing) == 0 {
			break
		}
		var more []string
		more, missing, err = rung(ctx, missing, &started)
		env = append(env, more...)
		if err != nil {
			return nil, started.close, err
		}
	}
	if len(missing) > 0 {
		return nil, started.close, notFound(missing)
	}
	return env, started.close, nil
}

// notFound returns a one-line error that lists the ways to fix it.
func notFound(missing []need) error {
	var packages, vars []string
	for _, n := range missing {
		packages = append(packages, n.aptPackage)
		vars = append(vars, n.vars...)
	}
	return fmt.Errorf("install %s (the names of the Debian packages), or start Docker, or set %s",
		strings.Join(packages, ", "), strings.Join(vars, ", "))
}

// given reports whether the environment already has the server's addresses.
func given(n need) bool {
	return !slices.ContainsFunc(n.vars, func(name string) bool { return os.Getenv(name) == "" })
}

func (n need) env(a address) []string {
	env := []string{n.vars[0] + "=" + a.url}
	if len(n.vars) > 1 {
		env = append(env, n.vars[1]+"="+a.adminURL)
	}
	return env
}

// startEach starts the needs in parallel. It returns a need whose start fails with testenv.ErrNotInstalled as missing.
func startEach(needs []need, start func(need) (address, error)) (env []string, missing []need, err error) {
	addresses, errs := make([]address, len(needs)), make([]error, len(needs))
	var wg sync.WaitGroup
	for i, n := range needs {
		wg.Go(func() { addresses[i], errs[i] = start(n) })
	}
	wg.Wait()
	for i, n := range needs {
		switch {
		case errs[i] == nil:
			env = append(env, n.env(addresses[i])...)
		case errors.Is(errs[i], testenv.ErrNotInstalled):
			missing = append(missing, n)
		default:
			err = errors.Join(err, errs[i])
		}
	}
	return env, missing, err
}

func fromBinaries(ctx context.Context, needs []need, started *closers) ([]string, []need, error) {
	return startEach(needs, func(n need) (address, error) {
		s, err := testenv.Launch(ctx, n.kind, n.extra...)
		if err != nil {
			return address{}, err
		}
		started.add(s.Close)
		return address{s.URL(), s.AdminURL()}, nil
	})
}

const containerPatience = 3 * time.Minute

// container describes how to run one server in Docker.
type container struct {
	image string
	env   []string
	args  []string
	ports []string // for the address, then for the admin address
	urls  []string // with %s for host and port
}

var (
	postgresContainer = container{
		image: "postgres:17-alpine",
		env:   []string{"POSTGRES_PASSWORD=postgres"},
		args:  []string{"postgres", "-c", "max_connections=300", "-c", "max_pred_locks_per_transaction=256"},
		ports: []string{"5432"},
		urls:  []string{"postgres://postgres:postgres@%s/postgres?sslmode=disable"},
	}
	redisContainer = container{
		image: "redis:8.0-alpine",
		args:  []string{"redis-server", "--databases", "4096", "--save", "", "--appendonly", "no"},
		ports: []string{"6379"},
		urls:  []string{"redis://%s/0"},
	}
	rabbitContainer = container{
		image: "rabbitmq:4.0-management-alpine",
		ports: []string{"5672", "15672"},
		urls:  []string{"amqp://guest:guest@%s/", "http://guest:guest@%s"},
	}
	natsContainer = container{
		image: "nats:2.12-alpine",
		args:  []string{"sh", "-c", "printf 'max_payload: 33554432\\njetstream {}\\n' >/tmp/nats.conf && exec nats-server -c /tmp/nats.conf"},
		ports: []string{"4222"},
		urls:  []string{"nats://%s"},
	}
)

func fromContainers(ctx context.Context, needs []need, started *closers) ([]string, []need, error) {
	if !dockerAnswers(ctx) {
		return nil, needs, nil
	}
	return startEach(needs, func(n need) (address, error) {
		fmt.Fprintf(os.Stderr, "servers: starting %s\n", n.container.image)
		a, err := n.container.start(ctx, n.kind, started)
		if err != nil {
			return address{}, fmt.Errorf("%s: %w", n.container.image, err)
		}
		return a, nil
	})
}

func dockerAnswers(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	return exec.CommandContext(ctx, "docker", "info").Run() == nil
}

// start runs the container in the background, on free ports of the loopback interface.
func (c container) start(ctx context.Context, kind testenv.Kind, started *closers) (address, error) {
	name := "holdfast-" + strings.ToLower(rand.Text()[:12])
	args := []string{"run", "--rm", "--detach", "--name", name}
	var addresses [2]string
	for i, port := range c.ports {
		free, err := testenv.FreePort()
		if err != nil {
			return address{}, err
		}
		host := fmt.Sprintf("127.0.0.1:%d", free)
		addresses[i] = fmt.Sprintf(c.urls[i], host)
		args = append(args, "--publish", host+":"+port)
	}
	for _, variable := range c.env {
		args = append(args, "--env", variable)
	}
	started.add(func() error { return docker(context.Background(), "rm", "--force", "--volumes", name) }) // also after a failed start
	if err := docker(ctx, append(append(args, c.image), c.args...)...); err != nil {
		return address{}, err
	}
	a := address{url: addresses[0], adminURL: addresses[1]}
	return a, awaitAnswer(ctx, kind, a)
}

func docker(ctx context.Context, args ...string) error {
	if out, err := exec.CommandContext(ctx, "docker", args...).CombinedOutput(); err != nil {
		return fmt.Errorf("docker %s: %w\n%s", args[0], err, out)
	}
	return nil
}

// awaitAnswer waits until the server in a container answers.
func awaitAnswer(ctx context.Context, kind testenv.Kind, a address) error {
	ctx, cancel := context.WithTimeout(ctx, containerPatience)
	defer cancel()
	for {
		attempt, done := context.WithTimeout(ctx, 3*time.Second)
		err := testenv.Ping(attempt, kind, a.url, a.adminURL)
		done()
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return errors.Join(ctx.Err(), err)
		case <-time.After(200 * time.Millisecond):
		}
	}
}
