package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"time"

	"github.com/holdfast-go/holdfast/internal/testenv"
)

const containerPatience = 3 * time.Minute

// container is how to run one server under Docker.
type container struct {
	image string
	env   []string
	args  []string
	ports []string // of the address, then of the admin address
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

// awaitAnswer waits until the server in a container serves clients.
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
