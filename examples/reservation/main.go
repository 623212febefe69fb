// Command reservation is a ticket shop that composes all of Holdfast: events
// with numbered seats that users hold, confirm or lose. Run it without arguments
// and it keeps everything in memory; see the README for real servers, the roles
// of several processes, and the commands of an operator.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"

	"github.com/holdfast-go/holdfast/modules/service"
)

// The exit codes of the shop; package operator says what those of commands mean.
const (
	exitOK     = 0
	exitFailed = 1
	exitUsage  = 2
)

func main() {
	os.Exit(run(service.Signals(), os.Args[1:], os.Getenv, os.Stdout, os.Stderr))
}

// run is the program; it returns the exit code.
func run(ctx context.Context, args []string, getenv func(string) string, stdout, stderr io.Writer) int {
	cfg, err := parseConfig(args, getenv, stdout)
	if errors.Is(err, flag.ErrHelp) {
		return exitOK
	}
	if err != nil {
		fmt.Fprintln(stderr, "reservation: "+oneLine(err))
		return exitUsage
	}
	slog.SetDefault(slog.New(slog.NewTextHandler(stderr, nil)))
	if len(cfg.command) > 0 {
		return operate(ctx, cfg, stdout, stderr)
	}
	if err := serve(ctx, cfg, stdout); err != nil {
		fmt.Fprintln(stderr, "reservation: "+oneLine(err))
		return exitFailed
	}
	return exitOK
}

// must returns what a constructor made. It fails for a wrong Config only, which is a mistake in this program.
func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}
