package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"os"
	"time"

	"github.com/testcontainers/testcontainers-go"
	tclog "github.com/testcontainers/testcontainers-go/log"

	"github.com/holdfast-go/holdfast/internal/testenv"
)

const containerPatience = 3 * time.Minute

// container is how to run one server under Docker.
type container struct {
	image     string
	env       map[string]string
	cmd       []string
	port      string
	url       string // with %s for host and port
	adminPort string
	adminURL  string
}

var (
	postgresContainer = container{
		image: "postgres:17-alpine",
		env:   map[string]string{"POSTGRES_PASSWORD": "postgres"},
		cmd:   []string{"postgres", "-c", "max_connections=300", "-c", "max_pred_locks_per_transaction=256"},
		port:  "5432/tcp",
		url:   "postgres://postgres:postgres@%s/postgres?sslmode=disable",
	}
	redisContainer = container{
		image: "redis:8.0-alpine",
		cmd:   []string{"redis-server", "--databases", "4096", "--save", "", "--appendonly", "no"},
		port:  "6379/tcp",
		url:   "redis://%s/0",
	}
	rabbitContainer = container{
		image:     "rabbitmq:4.0-management-alpine",
		port:      "5672/tcp",
		url:       "amqp://guest:guest@%s/",
		adminPort: "15672/tcp",
		adminURL:  "http://guest:guest@%s",
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
	tclog.SetDefault(log.New(io.Discard, "", 0)) // no Docker is not worth a word here
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	docker, err := testcontainers.NewDockerProvider()
	return err == nil && docker.Health(ctx) == nil
}

func (c container) start(ctx context.Context, kind testenv.Kind, started *closers) (address, error) {
	ports := []string{c.port}
	if c.adminPort != "" {
		ports = append(ports, c.adminPort)
	}
	running, err := testcontainers.Run(ctx, c.image,
		testcontainers.WithEnv(c.env), testcontainers.WithCmd(c.cmd...), testcontainers.WithExposedPorts(ports...))
	if running != nil { // also beside an error
		started.add(func() error { return testcontainers.TerminateContainer(running) })
	}
	if err != nil {
		return address{}, err
	}
	a, err := c.address(ctx, running)
	if err != nil {
		return address{}, err
	}
	return a, awaitAnswer(ctx, kind, a)
}

func (c container) address(ctx context.Context, running testcontainers.Container) (address, error) {
	host, err := running.PortEndpoint(ctx, c.port, "")
	if err != nil {
		return address{}, err
	}
	a := address{url: fmt.Sprintf(c.url, host)}
	if c.adminPort == "" {
		return a, nil
	}
	adminHost, err := running.PortEndpoint(ctx, c.adminPort, "")
	a.adminURL = fmt.Sprintf(c.adminURL, adminHost)
	return a, err
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
