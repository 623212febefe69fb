package main

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/testcontainers/testcontainers-go"
	"github.com/testcontainers/testcontainers-go/wait"
)

// The images are those of compose.yaml.
const (
	postgresImage = "postgres:17-alpine"
	redisImage    = "redis:8.0-alpine"
	rabbitImage   = "rabbitmq:4.0-management-alpine"
)

const containersTimeout = 5 * time.Minute // images may have to be pulled first

// containers are the servers that this process has started for itself.
type containers []testcontainers.Container

// startContainers starts a server of each kind that is wanted and puts the addresses into cfg.
func startContainers(ctx context.Context, cfg *config) (_ containers, err error) {
	ctx, cancel := context.WithTimeout(ctx, containersTimeout)
	defer cancel()
	if err := dockerAnswers(ctx); err != nil {
		return nil, fmt.Errorf("-backend=containers needs a Docker engine that answers: %w", err)
	}
	var started containers
	defer func() {
		if err != nil {
			started.stop()
		}
	}()
	start := func(name, port, url string, request testcontainers.ContainerRequest) (string, error) {
		slog.InfoContext(ctx, "starting container", slog.String("image", request.Image))
		request.ExposedPorts = []string{port}
		c, err := testcontainers.GenericContainer(ctx, testcontainers.GenericContainerRequest{
			ContainerRequest: request, Started: true,
		})
		if c != nil {
			started = append(started, c)
		}
		if err != nil {
			return "", fmt.Errorf("start %s: %w", name, err)
		}
		endpoint, err := c.PortEndpoint(ctx, port, "")
		if err != nil {
			return "", fmt.Errorf("start %s: %w", name, err)
		}
		return fmt.Sprintf(url, endpoint), nil
	}

	cfg.databaseURL, err = start("Postgres", "5432/tcp", "postgres://postgres:postgres@%s/postgres?sslmode=disable",
		testcontainers.ContainerRequest{
			Image: postgresImage,
			Env:   map[string]string{"POSTGRES_PASSWORD": "postgres"},
			// The server starts once more after its first start has made the database.
			WaitingFor: wait.ForLog("ready to accept connections").WithOccurrence(2),
		})
	if err != nil {
		return nil, err
	}
	cfg.redisURL, err = start("Redis", "6379/tcp", "redis://%s/0", testcontainers.ContainerRequest{
		Image: redisImage, WaitingFor: wait.ForLog("Ready to accept connections"),
	})
	if err != nil || cfg.broker != brokerRabbitMQ {
		return started, err
	}
	cfg.amqpURL, err = start("RabbitMQ", "5672/tcp", "amqp://guest:guest@%s/", testcontainers.ContainerRequest{
		Image: rabbitImage, WaitingFor: wait.ForLog("Server startup complete"),
	})
	if err != nil {
		return nil, err
	}
	return started, nil
}

// dockerAnswers asks before anything is started: the library panics where there is no engine at all.
func dockerAnswers(ctx context.Context) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("%v", p)
		}
	}()
	provider, err := testcontainers.NewDockerProvider()
	if err != nil {
		return err
	}
	defer provider.Close()
	return provider.Health(ctx)
}

// stop removes the containers, also when the process is being ended.
func (c containers) stop() {
	for _, container := range c {
		// One that stays is removed by the library's own reaper once this process is gone.
		_ = testcontainers.TerminateContainer(container)
	}
}
