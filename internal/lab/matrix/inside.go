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

	"github.com/holdfast-go/holdfast/internal/lab/versions"
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
		"txretry", "txretry/pgtest", "outbox/outboxpgx", "inbox/inboxpgx", "idempotency/idempotencypgx",
		"expiry/expirypgx", "internal/pgnotify", "internal/pgprune", "internal/lab/databasesql",
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
	said := map[string][2]string{}
	for _, kind := range []testenv.Kind{testenv.Postgres, testenv.Redis, testenv.RabbitMQ} {
		s, err := testenv.Launch(ctx, kind)
		if err != nil {
			return exitUnusable, err
		}
		defer s.Close()
		product, version, err := versions.Ask(ctx, s)
		if err != nil {
			return exitUnusable, err
		}
		said[string(kind)] = [2]string{product, version}
		env = append(env, addresses(s)...)
	}
	var all []outcome
	for _, product := range products {
		o := outcome{Product: said[product][0], Version: said[product][1]}
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
	if failed := cmd.Wait(); failed != nil && len(s.Failed) == 0 {
		s.Failed = append(s.Failed, failed.Error())
	}
	if err == nil && s.Passed == 0 && len(s.Failed) == 0 {
		s.Failed = append(s.Failed, "no test was run")
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
