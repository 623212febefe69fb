// Command holdfast operates a service that is built on Holdfast: see package operator. What the service
// has is in a file, and the addresses of its servers are in DATABASE_URL, AMQP_URL and REDIS_URL.
package main

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/spf13/pflag"

	"github.com/holdfast-go/holdfast/examples/operator"
)

const (
	program   = "holdfast"
	exitUsage = 2
)

func main() {
	// Once the first signal has begun the shutdown, a second one ends the process at once.
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	context.AfterFunc(ctx, stop)
	os.Exit(run(ctx, os.Args[1:], os.Getenv, os.Stdout, os.Stderr))
}

// run is the program; it returns the exit code.
func run(ctx context.Context, args []string, getenv func(string) string, stdout, stderr io.Writer) int {
	fail := func(err error) int {
		fmt.Fprintf(stderr, "%s: %s\n", program, strings.ReplaceAll(err.Error(), "\n", "; "))
		return exitUsage
	}
	slog.SetDefault(slog.New(slog.NewTextHandler(stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))) // the commands say the rest
	path, args := configPath(args, getenv)
	f, err := readFile(path)
	if err != nil {
		return fail(err)
	}
	service, closeAll, err := open(f, getenv)
	if err != nil {
		return fail(err)
	}
	defer closeAll()
	o, err := operator.New(service)
	if err != nil {
		return fail(err)
	}
	return o.Run(ctx, args, stdout, stderr)
}

// defaultConfig is read where no file is named, if it exists.
const defaultConfig = "holdfast.yaml"

// configPath takes --config out of the arguments: what commands there are does not depend on it, but
// what they work on does.
func configPath(args []string, getenv func(string) string) (path string, rest []string) {
	flags := pflag.NewFlagSet(program, pflag.ContinueOnError)
	flags.ParseErrorsAllowlist.UnknownFlags = true
	flags.Usage = func() {}
	flags.StringVar(&path, "config", getenv("HOLDFAST_CONFIG"), "")
	_ = flags.Parse(args) // what is wrong with other flags is their command's to say
	for i := 0; i < len(args); i++ {
		switch {
		case args[i] == "--config":
			i++
		case !strings.HasPrefix(args[i], "--config="):
			rest = append(rest, args[i])
		}
	}
	return path, rest
}
