package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"
)

// command is one subcommand.
type command struct {
	name, help string
	// run returns the exit code. Its error is printed on one line; a *usageError makes the code exitUsage.
	run func(ctx context.Context, c *commandContext, args []string) (code int, err error)
}

// commandContext is what a command works with.
type commandContext struct {
	parts  *parts
	stdout io.Writer
}

func commands() []command {
	return []command{
		{"relay", "publish what is in the outbox, and end: --limit, --time-limit", runRelay},
		{"dead", "dead letters: list, show, retry, remove, audit", runDead},
		{"sweep", "expire what is overdue, once", runSweep},
		{"prune", "delete records that are older than their retention", runPrune},
		{"migrate", "create or update tables and what the broker needs", runMigrate},
		{"doctor", "look for what is missing or mis-set on the servers", runDoctor},
	}
}

// usageError is a mistake in the command line.
type usageError struct{ err error }

func (e *usageError) Error() string { return e.err.Error() }
func (e *usageError) Unwrap() error { return e.err }

func usagef(format string, args ...any) error { return &usageError{fmt.Errorf(format, args...)} }

// runCommand runs a subcommand and returns the exit code.
func runCommand(ctx context.Context, cfg config, stdout, stderr io.Writer) int {
	code, err := doCommand(ctx, cfg, stdout)
	if errors.Is(err, flag.ErrHelp) {
		return exitOK
	}
	if err != nil {
		fmt.Fprintln(stderr, "reservation: "+oneLine(err)+hint(err))
		if _, mistake := errors.AsType[*usageError](err); mistake {
			return exitUsage
		}
	}
	return code
}

// hint names the command that mends an error.
func hint(err error) string {
	if missing, ok := errors.AsType[*pgconn.PgError](err); ok && missing.Code == "42P01" {
		return "; run `reservation migrate` first"
	}
	return ""
}

func doCommand(ctx context.Context, cfg config, stdout io.Writer) (int, error) {
	name, args := cfg.command[0], cfg.command[1:]
	all := commands()
	i := slices.IndexFunc(all, func(c command) bool { return c.name == name })
	if i < 0 {
		return exitUsage, usagef("unknown command %.40q; -h lists all", name)
	}
	if cfg.backend == backendContainers {
		return exitUsage, usagef("-backend=containers would start empty servers: a command needs -backend=services")
	}
	servers, err := newServers(cfg)
	if err != nil {
		return exitFailed, err
	}
	defer servers.close()
	return all[i].run(ctx, &commandContext{newParts(cfg, servers), stdout}, args)
}

// parseFlags parses the flags of a command, which takes no other arguments.
func parseFlags(c *commandContext, flags *flag.FlagSet, args []string) error {
	return parseArguments(c, flags, args, func(text string) error {
		return usagef("%s: unexpected argument %.40q", flags.Name(), text)
	})
}

// parseArguments parses flags and, between them and after them, arguments.
func parseArguments(c *commandContext, flags *flag.FlagSet, args []string, argument func(string) error) error {
	err := flags.Parse(args)
	if errors.Is(err, flag.ErrHelp) {
		fmt.Fprintf(c.stdout, "Usage: reservation %s [flags]\n", flags.Name())
		flags.SetOutput(c.stdout)
		flags.PrintDefaults()
		return err
	}
	if err != nil {
		return &usageError{err}
	}
	if flags.NArg() == 0 {
		return nil
	}
	if err := argument(flags.Arg(0)); err != nil {
		return err
	}
	return parseArguments(c, flags, flags.Args()[1:], argument)
}

// writeUsage prints what the program can do.
func writeUsage(w io.Writer, flags *flag.FlagSet) {
	fmt.Fprintln(w, "Usage: reservation [flags] [command]")
	fmt.Fprintln(w, "\nWithout a command the shop runs. Flags:")
	flags.SetOutput(w)
	flags.PrintDefaults()
	fmt.Fprintln(w, "\nCommands, on the servers of DATABASE_URL, REDIS_URL and AMQP_URL:")
	for _, c := range commands() {
		fmt.Fprintf(w, "  %s%s%s\n", c.name, strings.Repeat(" ", 10-len(c.name)), c.help)
	}
}
