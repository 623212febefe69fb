package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
	amqp "github.com/rabbitmq/amqp091-go"
	goredis "github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/internal/testenv"
)

// The products, as arguments.
const (
	postgres = "postgres"
	redis    = "redis"
	rabbitmq = "rabbitmq"
)

// suites are the packages that stand on a product.
var suites = map[string][]string{
	postgres: {
		"txretry", "txretry/pgtest", "txretry/txretrysql", "outbox/outboxpgx", "inbox/inboxpgx", "idempotency/idempotencypgx",
		"expiry/expirypgx", "internal/pgnotify", "internal/pgprune",
	},
	redis:    {"outbox/outboxredis", "inbox/inboxredis", "idempotency/idempotencyredis", "ratelimit/ratelimitredis"},
	rabbitmq: {"outbox/outboxamqp", "inbox/inboxamqp", "internal/amqpconn"},
}

// outcome is what came of the suites on one server.
type outcome struct {
	Product, Version, Release string
	Suites                    []suite
}

// suite is what came of the tests of one package.
type suite struct {
	Package         string
	Passed, Skipped int
	Failed          []string
}

func (o outcome) failed() bool {
	return slices.ContainsFunc(o.Suites, func(s suite) bool { return len(s.Failed) > 0 })
}

// runInside runs the suites on this machine's servers.
func runInside(ctx context.Context, products []string) (int, error) {
	env := os.Environ()
	versions := map[string][2]string{}
	for _, kind := range []testenv.Kind{testenv.Postgres, testenv.Redis, testenv.RabbitMQ} {
		s, err := testenv.Launch(ctx, kind)
		if err != nil {
			return exitUnusable, err
		}
		defer s.Close()
		product, version, err := ask(ctx, s)
		if err != nil {
			return exitUnusable, err
		}
		versions[string(kind)] = [2]string{product, version}
		env = append(env, addresses(s)...)
	}
	var all []outcome
	for _, product := range products {
		o := outcome{Product: versions[product][0], Version: versions[product][1]}
		for _, name := range suites[product] {
			fmt.Fprintf(os.Stderr, "matrix: %s %s: %s\n", o.Product, o.Version, name)
			s, err := test(ctx, name, env)
			if err != nil {
				return exitUnusable, err
			}
			o.Suites = append(o.Suites, s)
		}
		all = append(all, o)
	}
	return 0, json.NewEncoder(os.Stdout).Encode(all)
}

// addresses are the variables that name a server for tests.
func addresses(s *testenv.Server) []string {
	switch s.Kind() {
	case testenv.Postgres:
		return []string{testenv.PostgresVar + "=" + s.URL()}
	case testenv.Redis:
		return []string{testenv.RedisVar + "=" + s.URL()}
	default:
		return []string{testenv.AMQPVar + "=" + s.URL(), testenv.AMQPAdminVar + "=" + s.AdminURL()}
	}
}

// ask returns what a server says that it is.
func ask(ctx context.Context, s *testenv.Server) (product, version string, err error) {
	switch s.Kind() {
	case testenv.Postgres:
		return askPostgres(ctx, s.URL())
	case testenv.Redis:
		return askRedis(ctx, s.URL())
	default:
		return askRabbitMQ(s.URL())
	}
}

// askPostgres names the PgBouncer too, behind which its suites run as well.
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
	opts, err := goredis.ParseURL(url)
	if err != nil {
		return "", "", err
	}
	client := goredis.NewClient(opts)
	defer client.Close()
	info, err := client.Info(ctx, "server").Result()
	if err != nil {
		return "", "", err
	}
	product, version = readInfo(info)
	return product, version, nil
}

// readInfo reads the product and its version. Valkey tells the version of Redis whose commands it has, too.
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

// test runs the tests of one package.
func test(ctx context.Context, name string, env []string) (suite, error) {
	cmd := exec.CommandContext(ctx, "go", "test", "-json", "-vet=off", "-count=1", "-timeout=60m", "./"+name)
	cmd.Env, cmd.Stderr = env, os.Stderr
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		return suite{}, err
	}
	s, err := read(name, out, os.Stderr)
	if failed := cmd.Wait(); err == nil && failed != nil && len(s.Failed) == 0 {
		err = fmt.Errorf("%s: %w", name, failed)
	}
	if err == nil && s.Passed == 0 && len(s.Failed) == 0 {
		err = fmt.Errorf("%s: no test was run", name)
	}
	return s, err
}

// event is a line of go test -json.
type event struct{ Action, Test, Output string }

// read counts the tests, not their parts, and repeats what the failed ones said.
func read(name string, events io.Reader, log io.Writer) (suite, error) {
	s, said := suite{Package: name}, map[string]string{}
	lines := bufio.NewScanner(events)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var e event
		if err := json.Unmarshal(lines.Bytes(), &e); err != nil {
			return s, fmt.Errorf("%s: %q: %w", name, lines.Text(), err)
		}
		test, _, part := strings.Cut(e.Test, "/")
		said[test] += e.Output
		switch {
		case part:
		case e.Action == "pass" && test != "":
			s.Passed++
		case e.Action == "skip" && test != "":
			s.Skipped++
		case e.Action == "fail" && test != "":
			s.Failed = append(s.Failed, test)
			fmt.Fprint(log, said[test])
		case e.Action == "fail" && len(s.Failed) == 0:
			s.Failed = append(s.Failed, "the package")
			fmt.Fprint(log, said[test])
		}
	}
	return s, lines.Err()
}
