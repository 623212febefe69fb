package operator

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
)

// The exit codes.
const (
	exitOK     = 0
	exitFailed = 1
	exitUsage  = 2
)

// Operator is the operator's side of one service. Make it with New. It is safe for concurrent use.
type Operator struct {
	cfg Config
	// turns are those of who looks at the dead letters of a consumer, by its name.
	turns map[string]turn
	// claims are the last counts of the parts that count them, in their order.
	claims []claimsCount
}

// New returns an Operator. The error names every violation in cfg. Nothing is asked of a server yet.
func New(cfg Config) (*Operator, error) {
	cfg = cfg.withDefaults()
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	o := &Operator{cfg: cfg, turns: map[string]turn{}}
	o.claims = make([]claimsCount, len(o.counters()))
	for _, c := range cfg.Consumers {
		o.turns[c.Name] = make(turn, 1)
	}
	return o, nil
}

// Run runs the command that the arguments say and returns the exit code of the process. An error is
// one line on stderr.
func (o *Operator) Run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	return Execute(ctx, o.Command(), args, stdout, stderr)
}

// Execute is Run for a command that Command is, or is one of.
func Execute(ctx context.Context, root *cobra.Command, args []string, stdout, stderr io.Writer) int {
	root.SetArgs(args)
	root.SetOut(stdout)
	root.SetErr(stderr)
	cmd, err := root.ExecuteContextC(ctx)
	if err != nil && err.Error() != "" {
		text := strings.TrimPrefix(plain(oneLine(err)), root.Name()+": ") // of a place with the name of the program
		fmt.Fprintf(stderr, "%s: %s%s\n", root.Name(), text, hint(cmd, err))
	}
	return ExitCode(err)
}

// Command returns the commands, for a program that has others too: run its root by Execute. The commands
// do not print their errors, and write to what cobra calls their output.
func (o *Operator) Command() *cobra.Command {
	root := &cobra.Command{
		Use: o.cfg.Program, Short: "See the state of a service and mend it",
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
	return root
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
				err = usagef("--%s has no value", flag.Name)
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

// usagef is a mistake in the command line.
func usagef(format string, args ...any) error {
	return &exitError{exitUsage, fmt.Errorf(format, args...)}
}

// parent is a command that needs one of others behind it.
func parent(use, short string, children ...*cobra.Command) *cobra.Command {
	names := make([]string, len(children))
	for i, c := range children {
		names[i] = c.Name()
	}
	cmd := &cobra.Command{Use: use, Short: short, Args: cobra.ArbitraryArgs}
	cmd.RunE = func(_ *cobra.Command, args []string) error {
		if len(args) > 0 {
			return usagef("%s: %.40q is none of %s", use, args[0], strings.Join(names, ", "))
		}
		return usagef("%s: say %s", use, strings.Join(names, " or "))
	}
	cmd.AddCommand(children...)
	return cmd
}

// noArguments refuses arguments as a mistake in the command line.
func noArguments(cmd *cobra.Command, args []string) error {
	if len(args) > 0 {
		return usagef("%s: unexpected argument %.40q", cmd.CommandPath(), args[0])
	}
	return nil
}

// oneLine is an error on one line, however many are joined in it.
func oneLine(err error) string { return strings.ReplaceAll(err.Error(), "\n", "; ") }

// isTerminal reports whether w is a terminal, where lines may be drawn again. Not every character device is one: /dev/null is not.
func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	return ok && term.IsTerminal(int(f.Fd()))
}
