// Command bareshop holds seats as examples/reservation does, with no guarantee but the lock on the seat: it has no
// idempotency keys, outbox, limits, retries, expiry or read model. Its requests, answers and tables are those of the
// shop; a lost race is a 409 of the same form. It says "listening on" and its address, and ends at a SIGTERM. The
// benchmark compares the shop with it.
package main

import (
	"context"
	_ "embed"
	"errors"
	"flag"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
)

// conns is as many as the shop has for requests.
const conns = 16

// schema has the tables that a hold reads and writes, with their indexes.
//
//go:embed schema.sql
var schema string

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	err := run(ctx)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "bareshop:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context) error {
	addr := flag.String("addr", "127.0.0.1:0", "`address` to listen on")
	flag.Parse()
	cfg, err := pgxpool.ParseConfig(os.Getenv("DATABASE_URL"))
	if err != nil {
		return err
	}
	cfg.MaxConns = conns
	pool, err := pgxpool.NewWithConfig(ctx, cfg)
	if err != nil {
		return err
	}
	defer pool.Close()
	if _, err := pool.Exec(ctx, schema); err != nil {
		return err
	}
	l, err := net.Listen("tcp", *addr)
	if err != nil {
		return err
	}
	return serve(ctx, l, seats{pool}.handler())
}

func serve(ctx context.Context, l net.Listener, h http.Handler) error {
	server := &http.Server{Handler: h, ReadHeaderTimeout: 10 * time.Second}
	closed := make(chan error, 1)
	context.AfterFunc(ctx, func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		closed <- server.Shutdown(ctx)
	})
	fmt.Printf("bareshop: listening on http://%s \n", l.Addr())
	if err := server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return <-closed
}
