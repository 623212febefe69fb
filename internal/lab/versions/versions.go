// Package versions reads the versions of servers.
package versions

import (
	"context"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go"
	amqp "github.com/rabbitmq/amqp091-go"
	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/internal/testenv"
)

// Ask returns the product and the version that a server reports. For Postgres it starts a PgBouncer and includes its version.
func Ask(ctx context.Context, s *testenv.Server) (product, version string, err error) {
	switch s.Kind() {
	case testenv.Postgres:
		return askPostgres(ctx, s.URL())
	case testenv.Redis:
		return askRedis(ctx, s.URL())
	case testenv.NATS:
		return askNATS(s.URL())
	default:
		return askRabbitMQ(s.URL())
	}
}

func askPostgres(ctx context.Context, url string) (product, version string, err error) {
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		return "", "", err
	}
	defer conn.Close(ctx)
	if err := conn.QueryRow(ctx, "SHOW server_version").Scan(&version); err != nil {
		return "", "", err
	}
	version, _, _ = strings.Cut(version, " ")
	pooler, err := testenv.Launch(ctx, testenv.PgBouncer, url)
	if err != nil {
		return "", "", err
	}
	defer pooler.Close()
	cfg, err := pgx.ParseConfig(pooler.URL())
	if err != nil {
		return "", "", err
	}
	cfg.Database, cfg.DefaultQueryExecMode = "pgbouncer", pgx.QueryExecModeSimpleProtocol
	console, err := pgx.ConnectConfig(ctx, cfg)
	if err != nil {
		return "", "", err
	}
	defer console.Close(ctx)
	var said string
	if err := console.QueryRow(ctx, "SHOW VERSION").Scan(&said); err != nil {
		return "", "", err
	}
	return "PostgreSQL", version + " with " + said, nil
}

func askRedis(ctx context.Context, url string) (product, version string, err error) {
	opts, err := redis.ParseURL(url)
	if err != nil {
		return "", "", err
	}
	client := redis.NewClient(opts)
	defer client.Close()
	info, err := client.Info(ctx, "server").Result()
	if err != nil {
		return "", "", err
	}
	product, version = readInfo(info)
	return product, version, nil
}

// readInfo parses the product and its version. Valkey also reports the version of Redis that it is compatible with.
func readInfo(info string) (product, version string) {
	for line := range strings.Lines(info) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), ":")
		switch {
		case name == "valkey_version":
			return "Valkey", value
		case name == "redis_version":
			product, version = "Redis", value
		}
	}
	return product, version
}

func askRabbitMQ(url string) (product, version string, err error) {
	conn, err := amqp.Dial(url)
	if err != nil {
		return "", "", err
	}
	defer conn.Close()
	return fmt.Sprint(conn.Properties["product"]), fmt.Sprint(conn.Properties["version"]), nil
}

func askNATS(url string) (product, version string, err error) {
	conn, err := nats.Connect(url)
	if err != nil {
		return "", "", err
	}
	defer conn.Close()
	return "NATS", conn.ConnectedServerVersion(), nil
}
