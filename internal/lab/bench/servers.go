package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/testenv"
)

// maxConns is enough for a connection per goroutine of every workload.
const maxConns = 40

// servers are those that a workload asked for.
type servers struct {
	urls     map[testenv.Kind]string
	launched []*testenv.Server // the private ones, which end with the command
	endings  []func() error    // of the workload
}

// close ends what is left of a workload, then the servers.
func (b *bench) close() error {
	errs := []error{b.endWorkload()}
	for _, s := range slices.Backward(b.servers.launched) {
		errs = append(errs, s.Close())
	}
	return errors.Join(errs...)
}

// endWorkload ends what the workload has started, the last one first: the connections of all workloads together would be
// more than Postgres accepts.
func (b *bench) endWorkload() error {
	var errs []error
	for _, end := range slices.Backward(b.servers.endings) {
		errs = append(errs, end())
	}
	b.servers.endings = nil
	return errors.Join(errs...)
}

// atEnd has f called when the workload has ended.
func (b *bench) atEnd(f func() error) { b.servers.endings = append(b.servers.endings, f) }

// server returns the address of a server: the one in the environment, else that
// of a private instance, started when it is first asked for.
func (b *bench) server(ctx context.Context, kind testenv.Kind, variable string) string {
	if url := os.Getenv(variable); url != "" {
		return url
	}
	if url := b.servers.urls[kind]; url != "" {
		return url
	}
	var extra []string
	if kind == testenv.RabbitMQ { // what waits in its queues is not to stop it: the tests' limit is low
		extra = append(extra, "vm_memory_high_watermark.absolute = 8GB")
	}
	s, err := testenv.Launch(ctx, kind, extra...)
	if errors.Is(err, testenv.ErrNotInstalled) {
		check(fmt.Errorf("%w: set %s, or put `go run ./internal/lab/servers --` before the command", err, variable))
	}
	check(err)
	b.servers.launched = append(b.servers.launched, s)
	if b.servers.urls == nil {
		b.servers.urls = map[testenv.Kind]string{}
	}
	b.servers.urls[kind] = s.URL()
	return s.URL()
}

// launch starts a private server.
func (b *bench) launch(ctx context.Context, kind testenv.Kind, extra ...string) *testenv.Server {
	s := must(testenv.Launch(ctx, kind, extra...))
	b.servers.launched = append(b.servers.launched, s)
	return s
}

// postgres returns a pool whose tables live in a schema of their own, for as
// long as the workload runs.
func (b *bench) postgres(ctx context.Context) *pgxpool.Pool {
	url := b.server(ctx, testenv.Postgres, testenv.PostgresVar)
	schema := fmt.Sprintf("holdfast_bench_%d", time.Now().UnixNano())
	check(execOn(ctx, url, "CREATE SCHEMA "+schema))
	b.atEnd(func() error {
		ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
		defer cancel()
		return execOn(ctx, url, "DROP SCHEMA "+schema+" CASCADE")
	})
	cfg := must(pgxpool.ParseConfig(url))
	cfg.MaxConns = maxConns
	cfg.ConnConfig.RuntimeParams["search_path"] = schema
	return b.pool(ctx, cfg)
}

// rabbitmq returns the address of a broker.
func (b *bench) rabbitmq(ctx context.Context) string {
	return b.server(ctx, testenv.RabbitMQ, testenv.AMQPVar)
}

// pool returns a pool that is closed at the end.
func (b *bench) pool(ctx context.Context, cfg *pgxpool.Config) *pgxpool.Pool {
	pool := must(pgxpool.NewWithConfig(ctx, cfg))
	b.atEnd(func() error {
		pool.Close()
		return nil
	})
	return pool
}

func execOn(ctx context.Context, url, sql string) error {
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		return err
	}
	_, err = conn.Exec(ctx, sql)
	return errors.Join(err, conn.Close(ctx))
}
