// Package command has the commands of an operator for a terminal: New makes them for a service that an operator.Config
// lists, and Run runs one. A service mounts them in its own binary:
//
//	os.Exit(command.Run(ctx, service, os.Args[1:], os.Stdout, os.Stderr))
//
// Program cmd/holdfast reads what a service has from a file.
//
// # Exit codes
//
//	0  done, or nothing to do
//	1  it failed, an id is no dead letter, or it found what must be looked at: a finding of doctor, a poisoned row, a message that
//	   relay could not publish
//	2  a mistake in the command line, or a relay that could not run
package command

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"golang.org/x/term"

	"github.com/holdfast-go/holdfast/modules/operator"
	"github.com/holdfast-go/holdfast/modules/operator/internal/core"
)

// The exit codes.
const (
	exitOK     = 0
	exitFailed = 1
	exitUsage  = 2
)

// Run runs the command that the arguments say and returns the exit code of the process. An error is
// one line on stderr.
func Run(ctx context.Context, service operator.Config, args []string, stdout, stderr io.Writer) int {
	root, err := New(service)
	if err != nil {
		fmt.Fprintln(stderr, core.Plain(core.OneLine(err)))
		return exitUsage
	}
	return Execute(ctx, root, args, stdout, stderr)
}

// Execute is Run for the command of New, or for one that has it among its own.
func Execute(ctx context.Context, root *cobra.Command, args []string, stdout, stderr io.Writer) int {
	root.SetArgs(args)
	root.SetOut(stdout)
	root.SetErr(stderr)
	cmd, err := root.ExecuteContextC(ctx)
	if err != nil && err.Error() != "" {
		text := strings.TrimPrefix(core.Plain(core.OneLine(err)), root.Name()+": ") // of a place with the name of the program
		fmt.Fprintf(stderr, "%s: %s%s\n", root.Name(), text, hint(cmd, err))
	}
	return ExitCode(err)
}

// New returns the commands for a service, for a program that has others too: run its root by Execute. The commands
// do not print their errors, and write to what cobra calls their output. The error names every violation in service.
func New(service operator.Config) (*cobra.Command, error) {
	shared, err := core.New(service)
	if err != nil {
		return nil, err
	}
	o := &commands{shared}
	root := &cobra.Command{
		Use: o.Config.Program, Short: "See the state of a service and mend it",
		Args: noArguments, RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	root.PersistentFlags().Bool("json", false, "print JSON")
	root.AddCommand(
		o.status(), o.outbox(), o.inbox(), o.groups(), o.show(), o.retry(), o.drop(), o.pause(), o.resume(), o.log(),
		o.limits(), o.idempotency(), o.expiry(), o.relay(), o.sweep(), o.prune(), o.setup(), o.doctor(), o.schema(), o.page(), o.mcp(),
	)
	quiet(root)
	strict(root)
	noFiles(root)
	return root, nil
}

// quiet keeps cobra from printing errors and usage, also below the root of another program.
func quiet(cmd *cobra.Command) {
	cmd.SilenceUsage, cmd.SilenceErrors = true, true
	cmd.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return &exitError{exitUsage, err} })
	for _, child := range cmd.Commands() {
		quiet(child)
	}
}

// strict refuses a flag without a value, of a variable that is not set for example: it would choose more than was meant.
// Who does it and why may be empty, where a command allows that.
func strict(cmd *cobra.Command) {
	for _, child := range cmd.Commands() {
		strict(child)
	}
	run := cmd.RunE
	cmd.RunE = func(cmd *cobra.Command, args []string) (err error) {
		cmd.LocalNonPersistentFlags().VisitAll(func(flag *pflag.Flag) {
			if flag.Changed && empty(flag.Value) && flag.Name != "reason" && flag.Name != "by" {
				err = core.Mistakef("--%s has no value", flag.Name)
			}
		})
		if err != nil {
			return err
		}
		return run(cmd, args)
	}
}

func empty(value pflag.Value) bool {
	several, ok := value.(pflag.SliceValue)
	return value.Type() == "string" && value.String() == "" || ok && len(several.GetSlice()) == 0
}

// ExitCode is the exit code for the error of a command: 0 for nil.
func ExitCode(err error) int {
	if err == nil {
		return exitOK
	}
	if exit, ok := errors.AsType[*exitError](err); ok {
		return exit.code
	}
	if _, ok := errors.AsType[*core.Mistake](err); ok {
		return exitUsage
	}
	if strings.HasPrefix(err.Error(), "unknown command ") { // of cobra, which has no type for it
		return exitUsage
	}
	return exitFailed
}

// missingTable is the SQLSTATE of a table that does not exist.
const missingTable = "42P01"

// hint names the command that mends an error: setup is beside the command or above it, also below the
// root of another program.
func hint(cmd *cobra.Command, err error) string {
	missing, ok := errors.AsType[*pgconn.PgError](err)
	if !ok || missing.Code != missingTable {
		return ""
	}
	for ; cmd != nil; cmd = cmd.Parent() {
		for _, child := range cmd.Commands() {
			if child.Name() == "setup" {
				return fmt.Sprintf("; run `%s` first", child.CommandPath())
			}
		}
	}
	return ""
}

// exitError ends the process with a code. Without err nothing more is to be said.
type exitError struct {
	code int
	err  error
}

func (e *exitError) Error() string {
	if e.err == nil {
		return ""
	}
	return e.err.Error()
}

func (e *exitError) Unwrap() error { return e.err }

// commands are the commands for one service.
type commands struct{ *core.Operator }

// parent is a command that needs one of others behind it.
func parent(use, short string, children ...*cobra.Command) *cobra.Command {
	names := make([]string, len(children))
	for i, c := range children {
		names[i] = c.Name()
	}
	cmd := &cobra.Command{Use: use, Short: short, Args: cobra.ArbitraryArgs}
	cmd.RunE = func(_ *cobra.Command, args []string) error {
		if len(args) > 0 {
			return core.Mistakef("%s: %.40q is none of %s", use, args[0], strings.Join(names, ", "))
		}
		return core.Mistakef("%s: say %s", use, strings.Join(names, " or "))
	}
	cmd.AddCommand(children...)
	return cmd
}

// noArguments refuses arguments as a mistake in the command line.
func noArguments(cmd *cobra.Command, args []string) error {
	if len(args) > 0 {
		return core.Mistakef("%s: unexpected argument %.40q", cmd.CommandPath(), args[0])
	}
	return nil
}

// isTerminal reports whether w is a terminal, where lines may be drawn again. Not every character device is one: /dev/null is not.
func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	return ok && term.IsTerminal(int(f.Fd()))
}
