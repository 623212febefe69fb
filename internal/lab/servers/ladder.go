package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"

	"github.com/holdfast-go/holdfast/internal/testenv"
)

// address is where one server answers.
type address struct{ url, adminURL string }

// need is one server the tests want.
type need struct {
	kind       testenv.Kind
	vars       []string // the address, then the admin address
	container  container
	aptPackage string
	extra      []string // of testenv.Launch
}

// notDurable spares the shared Postgres what only a crash of the machine needs. Tests of crashes have private servers.
var notDurable = []string{"-c", "fsync=off", "-c", "full_page_writes=off"}

var needs = []need{
	{testenv.Postgres, []string{testenv.PostgresVar}, postgresContainer, "postgresql", notDurable},
	{testenv.Redis, []string{testenv.RedisVar}, redisContainer, "redis-server", nil},
	{testenv.RabbitMQ, []string{testenv.AMQPVar, testenv.AMQPAdminVar}, rabbitContainer, "rabbitmq-server", nil},
}

// rung gets servers in one way. It returns the needs it had no means for as missing.
type rung func(ctx context.Context, needs []need, started *closers) (env []string, missing []need, err error)

// closers collects what must be ended, from several goroutines.
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

// startServers returns the environment that names a server for each need.
// What closeAll ends includes servers started before an error.
func startServers(ctx context.Context) (env []string, closeAll func() error, err error) {
	var started closers
	missing := slices.DeleteFunc(slices.Clone(needs), given)
	if !given(needs[0]) { // whoever gives a Postgres cares for its machine, too
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

// notFound tells in one line what would help.
func notFound(missing []need) error {
	var packages, vars []string
	for _, n := range missing {
		packages = append(packages, n.aptPackage)
		vars = append(vars, n.vars...)
	}
	return fmt.Errorf("install %s (the names of the Debian packages), or start Docker, or set %s",
		strings.Join(packages, ", "), strings.Join(vars, ", "))
}

// given reports whether the environment already holds the server's addresses.
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

// startEach starts the needs side by side. A need whose start reports
// testenv.ErrNotInstalled is returned as missing.
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
