// Command servers runs a command with Postgres, Redis and RabbitMQ at hand:
//
//	go run ./internal/lab/servers -- go test ./...
//
// It takes, for each server, the first that works of
//   - the address in the environment (HOLDFAST_TEST_POSTGRES_URL, HOLDFAST_TEST_REDIS_URL,
//     HOLDFAST_TEST_AMQP_URL with HOLDFAST_TEST_AMQP_ADMIN_URL),
//   - a private instance of the installed binaries, in a temporary folder on free ports,
//   - a container, where Docker answers,
//   - as root on Debian or Ubuntu, packages installed by apt-get, their daemons not started,
//
// gets PgBouncer and curl in the last of these ways, and with HOLDFAST_NIGHTLY=1 Prometheus and Chromium, for the tests that
// start them, sets those variables, HOLDFAST_TEST_CHROMIUM and HOLDFAST_TEST_PRIVATE=1, which allows tests to start private
// servers, for the command, and exits with its code. The servers end with it,
// also on SIGINT and SIGTERM. Without servers it says in one line what to install and exits 2.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
)

const exitUnusable = 2

func main() {
	runtime.LockOSThread() // the command dies with the thread that starts it; the main thread lasts
	os.Exit(run())
}

func run() int {
	args := os.Args[1:]
	if len(args) > 0 && args[0] == "--" {
		args = args[1:]
	}
	if len(args) == 0 {
		fmt.Fprintln(os.Stderr, "usage: go run ./internal/lab/servers -- COMMAND [ARGUMENT…]")
		return exitUnusable
	}
	ctx, stop := untilSignal(context.Background())
	defer stop()

	env, closeAll, err := startServers(ctx)
	defer func() {
		if err := closeAll(); err != nil {
			fmt.Fprintln(os.Stderr, "servers:", err)
		}
	}()
	if ended := new(signalError); errors.As(context.Cause(ctx), &ended) {
		return ended.exitCode()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "servers:", err)
		return exitUnusable
	}
	code, err := runCommand(ctx, args, env)
	if err != nil {
		fmt.Fprintln(os.Stderr, "servers:", err)
	}
	return code
}
