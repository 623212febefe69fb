// Command holdfast operates a service that is built on Holdfast: see package operator. What the service
// has is in a file, and the addresses of its servers are in DATABASE_URL, AMQP_URL and REDIS_URL.
package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"

	"github.com/spf13/pflag"

	"github.com/holdfast-go/holdfast/modules/operator"
	"github.com/holdfast-go/holdfast/modules/operator/command"
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
	help := asksForHelp(args)
	service, closeAll, err := load(args, getenv)
	if err != nil && !help {
		return fail(err)
	}
	defer closeAll()
	root, err := command.New(service)
	if err != nil {
		return fail(err)
	}
	root.PersistentFlags().String("config", "", "the `file` of what the service has (default: HOLDFAST_CONFIG, or "+defaultConfig+")")
	if err := root.MarkPersistentFlagFilename("config", "yaml", "yml"); err != nil {
		return fail(err)
	}
	return command.Execute(ctx, root, args, stdout, stderr)
}

// load opens what the file has that the arguments name.
func load(args []string, getenv func(string) string) (operator.Config, func(), error) {
	nothing, noClose := operator.Config{Program: program}, func() {}
	path, err := configPath(args, getenv)
	if err != nil {
		return nothing, noClose, err
	}
	f, err := readFile(path)
	if err != nil {
		return nothing, noClose, err
	}
	service, closeAll, err := open(f, getenv)
	if err != nil {
		return nothing, noClose, err
	}
	return service, closeAll, nil
}

// asksForHelp reports whether the arguments ask for what needs no service.
func asksForHelp(args []string) bool {
	if len(args) == 0 || slices.Contains(args, "--help") || slices.Contains(args, "-h") {
		return true
	}
	return slices.Contains([]string{"help", "completion", "__complete", "__completeNoDesc"}, args[0])
}

// defaultConfig is read where no file is named.
const defaultConfig = "holdfast.yaml"

// configPath is what --config says, before the commands are there: what they work on depends on it. A name
// that is empty is that of a variable which is not set, and not the default.
func configPath(args []string, getenv func(string) string) (string, error) {
	flags := pflag.NewFlagSet(program, pflag.ContinueOnError)
	flags.ParseErrorsAllowlist.UnknownFlags = true
	flags.Usage = func() {}
	flags.SetOutput(io.Discard)
	path := flags.String("config", "", "")
	if err := flags.Parse(args); err != nil && strings.Contains(err.Error(), "config") {
		return "", err // what is wrong with other flags is their command's to say
	}
	if flags.Changed("config") && *path == "" {
		return "", errors.New("--config has no value")
	}
	return cmp.Or(*path, getenv("HOLDFAST_CONFIG"), defaultConfig), nil
}
