// Package command has an operator's commands for a terminal. New makes them for the service in an operator.Config,
// and Run runs one. A service mounts them in its own binary:
//
//	os.Exit(command.Run(ctx, service, os.Args[1:], os.Stdout, os.Stderr))
//
// The program cmd/holdfast reads the parts of a service from a file.
//
// # Exit codes
//
//	0  done, or nothing to do
//	1  a failure, an id that is no dead letter, or something to check: a finding of doctor, a poisoned row, a message
//	   that relay could not publish
//	2  a mistake in the command line, or a relay that could not run
package command

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/user"
	"slices"
	"strconv"
	"strings"
	"sync"
	"text/tabwriter"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/modelcontextprotocol/go-sdk/mcp"
	"github.com/schollz/progressbar/v3"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"golang.org/x/term"

	"github.com/holdfast-go/holdfast/modules/operator"
	"github.com/holdfast-go/holdfast/modules/operator/agents"
	"github.com/holdfast-go/holdfast/modules/operator/internal/core"
	"github.com/holdfast-go/holdfast/modules/operator/page"
	"github.com/holdfast-go/holdfast/outbox"
)

// The exit codes.
const (
	exitOK     = 0
	exitFailed = 1
	exitUsage  = 2
)

// Run runs the command in args and returns the exit code of the process. It prints an error as one line on stderr.
func Run(ctx context.Context, service operator.Config, args []string, stdout, stderr io.Writer) int {
	root, err := New(service)
	if err != nil {
		fmt.Fprintln(stderr, core.Plain(core.OneLine(err)))
		return exitUsage
	}
	return Execute(ctx, root, args, stdout, stderr)
}

// Execute is Run for the command that New returned, or for a root that contains its commands.
func Execute(ctx context.Context, root *cobra.Command, args []string, stdout, stderr io.Writer) int {
	root.SetArgs(args)
	root.SetOut(stdout)
	root.SetErr(stderr)
	cmd, err := root.ExecuteContextC(ctx)
	if err != nil && err.Error() != "" {
		text := strings.TrimPrefix(core.Plain(core.OneLine(err)), root.Name()+": ") // a place may have the program's name
		fmt.Fprintf(stderr, "%s: %s%s\n", root.Name(), text, hint(cmd, err))
	}
	return ExitCode(err)
}

// New returns the commands for a service. A program with other commands adds these and runs its root by Execute. The
// commands write to cobra's outputs and do not print their errors. The error names every violation in service.
func New(service operator.Config) (*cobra.Command, error) {
	shared, err := core.New(service)
	if err != nil {
		return nil, err
	}
	o := &commands{shared}
	root := &cobra.Command{
		Use: o.Config.Program, Short: "Show the state of a service and repair it",
		Args: noArguments, RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	root.PersistentFlags().Bool("json", false, "print JSON")
	root.AddCommand(
		o.status(), o.running(), o.outbox(), o.inbox(), o.groups(), o.show(), o.retry(), o.drop(), o.postpone(), o.pause(), o.resume(), o.log(),
		o.limits(), o.idempotency(), o.expiry(), o.relay(), o.sweep(), o.prune(), o.setup(), o.doctor(), o.schema(), o.page(), o.mcp(),
	)
	quiet(root)
	strict(root)
	noFiles(root)
	return root, nil
}

// quiet stops cobra from printing errors and usage, also below the root of another program.
func quiet(cmd *cobra.Command) {
	cmd.SilenceUsage, cmd.SilenceErrors = true, true
	cmd.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return &exitError{exitUsage, err} })
	for _, child := range cmd.Commands() {
		quiet(child)
	}
}

// strict rejects a flag with an empty value, such as an unset variable: it would choose more than intended.
// The flags --by and --reason may be empty, if the command allows it.
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
	if strings.HasPrefix(err.Error(), "unknown command ") { // cobra has no type for it
		return exitUsage
	}
	return exitFailed
}

// missingTable is the SQLSTATE of a table that does not exist.
const missingTable = "42P01"

// hint names the command that fixes an error. It is the nearest setup beside the command or above it, also below
// the root of another program.
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

// exitError ends the process with a code. If err is nil, nothing more is printed.
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

// parent is a command that only has subcommands.
func parent(use, short string, children ...*cobra.Command) *cobra.Command {
	names := make([]string, len(children))
	for i, c := range children {
		names[i] = c.Name()
	}
	cmd := &cobra.Command{Use: use, Short: short, Args: cobra.ArbitraryArgs}
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if len(args) > 0 {
			return core.Mistakef("%s: %.40q is none of %s%s", use, args[0], strings.Join(names, ", "), meant(cmd, args[0]))
		}
		return core.Mistakef("%s: choose %s", use, strings.Join(names, " or "))
	}
	cmd.AddCommand(children...)
	return cmd
}

// meant names the subcommands that are similar to a typed word.
func meant(cmd *cobra.Command, typed string) string {
	const typos = 2
	cmd.SuggestionsMinimumDistance = typos
	if similar := cmd.SuggestionsFor(typed); len(similar) > 0 {
		return "; did you mean " + strings.Join(similar, " or ") + "?"
	}
	return ""
}

// noArguments rejects arguments as a usage error.
func noArguments(cmd *cobra.Command, args []string) error {
	if len(args) > 0 {
		return core.Mistakef("%s: unexpected argument %.40q%s", cmd.CommandPath(), args[0], meant(cmd, args[0]))
	}
	return nil
}

// isTerminal reports whether w is a terminal, where lines can be redrawn. /dev/null is a character device, but no terminal.
func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	return ok && term.IsTerminal(int(f.Fd()))
}

// addSelectFlags adds the flags that choose dead letters. An empty kind stands for outboxes and consumers.
func (o *commands) addSelectFlags(cmd *cobra.Command, kind string) *core.Typed {
	t := &core.Typed{}
	flags := cmd.Flags()
	o.addFrom(cmd, kind, &t.From)
	flags.StringVar(&t.Name, "name", "", "only messages of this `name`")
	flags.StringVar(&t.Key, "key", "", "only messages of this ordering `key`")
	flags.StringVar(&t.Class, "class", "", "only failures of this `class`")
	flags.StringVar(&t.Group, "group", "", "only failures of this `kind`, as groups prints it")
	flags.StringVar(&t.Error, "error", "", "only failures with this `text` in the error")
	flags.StringVar(&t.Since, "since", "", "only failures since this `time`: 2h for two hours ago, or 2026-01-02T15:04:05Z")
	flags.StringVar(&t.Until, "until", "", "only failures before this `time`")
	flags.IntVar(&t.Limit, "limit", 0, "at most this many from each outbox or consumer (groups: this many groups)")
	for flag, value := range flagValues {
		complete(cmd, flag, o.completing(kind, value))
	}
	return t
}

// addFrom adds --from. An empty kind stands for outboxes and consumers.
func (o *commands) addFrom(cmd *cobra.Command, kind string, names *[]string) {
	known := o.PlaceNames(kind)
	usage := "only from this `place`: " + strings.Join(known, ", ")
	if kind == "" {
		usage += ", or all outboxes (outbox) or consumers (inbox)"
		known = append(known, core.KindOutbox, core.KindInbox)
	}
	cmd.Flags().StringSliceVar(names, "from", nil, usage)
	complete(cmd, "from", several(known))
}

// changeFlags are the flags of a command that changes something.
type changeFlags struct{ c core.Change }

func addChangeFlags(cmd *cobra.Command) *changeFlags {
	return addNotedFlags(cmd, "change nothing, only report")
}

// addNotedFlags is addChangeFlags with another description of --dry-run.
func addNotedFlags(cmd *cobra.Command, dryRun string) *changeFlags {
	f := &changeFlags{}
	flags := cmd.Flags()
	flags.StringVar(&f.c.By, "by", osUser(), "`name` of the operator, for the log")
	flags.StringVar(&f.c.Reason, "reason", "", "`reason` for the log")
	flags.BoolVar(&f.c.DryRun, "dry-run", false, dryRun)
	return f
}

// editFlags change bodies.
type editFlags struct{ file, patch string }

func addEditFlags(cmd *cobra.Command) *editFlags {
	f := &editFlags{}
	cmd.Flags().StringVar(&f.file, "body", "", "replace the body of one message by this `file` (-: standard input)")
	cmd.Flags().StringVar(&f.patch, "patch", "", "apply this JSON merge `patch` (RFC 7396) to the bodies, such as '{\"currency\":\"EUR\",\"total\":null}'")
	return f
}

// edit returns the edit that the flags ask for. ids are the messages on the command line.
func (f *editFlags) edit(cmd *cobra.Command, ids []string) (e core.Edit, err error) {
	e.Patch = f.patch
	if f.file != "" {
		if len(ids) != 1 {
			return e, core.Mistakef("--body: needs the id of one message")
		}
		if e.Body, err = readFile(cmd, f.file); err != nil {
			return e, core.Mistakef("--body: %w", err)
		}
	}
	if err := e.Validate(); err != nil {
		return e, core.Mistakef("%w", err)
	}
	return e, nil
}

// readFile reads at most one byte more than a body may have.
func readFile(cmd *cobra.Command, name string) ([]byte, error) {
	in := cmd.InOrStdin()
	if name != "-" {
		file, err := os.Open(name)
		if err != nil {
			return nil, err
		}
		defer file.Close()
		in = file
	}
	return io.ReadAll(io.LimitReader(in, core.MaxEdit+1))
}

// change returns the change that the flags ask for.
func (f *changeFlags) change() (core.Change, error) {
	if f.c.By == "" && !f.c.DryRun {
		return f.c, core.Mistakef("set --by")
	}
	if err := core.Validate(f.c); err != nil {
		return f.c, core.Mistakef("--%w", err)
	}
	return f.c, nil
}

// osUser returns the user who runs the program. In a container it may be a number without a name.
func osUser() string {
	u, err := user.Current()
	if err != nil || u.Username == "" {
		return fmt.Sprintf("uid %d", os.Getuid())
	}
	return u.Username
}

// seconds is a duration flag. A bare number is in seconds.
type seconds time.Duration

func (s *seconds) String() string { return time.Duration(*s).String() }

func (s *seconds) Type() string { return "time" }

func (s *seconds) Set(text string) error {
	if n, err := strconv.ParseUint(text, 10, 31); err == nil {
		*s = seconds(time.Duration(n) * time.Second)
		return nil
	}
	d, err := time.ParseDuration(text)
	if err != nil || d < 0 {
		return fmt.Errorf("want seconds or a duration such as 55s, not negative")
	}
	*s = seconds(d)
	return nil
}

// size is a number of bytes. K, M or G may follow it.
type size uint64

func (s *size) String() string { return strconv.FormatUint(uint64(*s), 10) }

func (s *size) Type() string { return "bytes" }

func (s *size) Set(text string) error {
	shift := 0
	for suffix, n := range map[string]int{"K": 10, "M": 20, "G": 30} {
		if number, ok := strings.CutSuffix(text, suffix); ok {
			text, shift = number, n
			break
		}
	}
	n, err := strconv.ParseUint(text, 10, 32)
	if err != nil {
		return fmt.Errorf("want bytes, or a number followed by K, M or G")
	}
	*s = size(n << shift)
	return nil
}

// completeTimeout bounds a completion: somebody has pressed a key and waits.
const completeTimeout = 3 * time.Second

// complete sets the completion of a flag's value.
func complete(cmd *cobra.Command, flag string, with cobra.CompletionFunc) {
	_ = cmd.RegisterFlagCompletionFunc(flag, with) // the flag is there, and has none yet
}

// noFiles turns off completion by file names, the default of shells, for all flags and arguments without a completion.
func noFiles(cmd *cobra.Command) {
	for _, child := range cmd.Commands() {
		noFiles(child)
	}
	if cmd.ValidArgsFunction == nil {
		cmd.ValidArgsFunction = cobra.NoFileCompletions
	}
	cmd.LocalFlags().VisitAll(func(flag *pflag.Flag) {
		_, completed := cmd.GetFlagCompletionFunc(flag.Name)
		file := flag.Name == "body" || flag.Annotations[cobra.BashCompSubdirsInDir] != nil
		if !completed && !file {
			complete(cmd, flag.Name, cobra.NoFileCompletions)
		}
	})
}

// among completes the known words that are not given yet.
func among(known []string) cobra.CompletionFunc {
	return func(_ *cobra.Command, given []string, typed string) ([]cobra.Completion, cobra.ShellCompDirective) {
		return completions(typed, given, known)
	}
}

// several completes each element of a comma-separated list.
func several(known []string) cobra.CompletionFunc {
	return func(_ *cobra.Command, _ []string, typed string) ([]cobra.Completion, cobra.ShellCompDirective) {
		at := strings.LastIndex(typed, ",") + 1
		found, directive := completions(typed[at:], strings.Split(typed[:at], ","), known)
		return core.Mapped(found, func(one cobra.Completion) cobra.Completion { return typed[:at] + one }), directive
	}
}

// first completes only the first argument.
func first(with cobra.CompletionFunc) cobra.CompletionFunc {
	return func(cmd *cobra.Command, given []string, typed string) ([]cobra.Completion, cobra.ShellCompDirective) {
		if len(given) > 0 {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		return with(cmd, given, typed)
	}
}

// completions returns the known texts that start with typed, each once, without the given ones. Shells show the part
// of a text after its tab beside it.
func completions(typed string, given, known []string) ([]cobra.Completion, cobra.ShellCompDirective) {
	values := map[string]bool{}
	for _, text := range known {
		text = strings.ReplaceAll(text, "\n", " ")
		word, _, _ := strings.Cut(text, "\t")
		if word != "" && strings.HasPrefix(word, typed) && !slices.Contains(given, word) {
			values[text] = true
		}
	}
	return slices.Sorted(maps.Keys(values)), cobra.ShellCompDirectiveNoFileComp
}

// flagValues complete the flags that choose dead letters with values of existing ones.
var flagValues = map[string]func(core.Message) string{
	"name":  func(m core.Message) string { return core.Plain(m.Name) },
	"key":   func(m core.Message) string { return core.Plain(m.Key) },
	"class": func(m core.Message) string { return core.Plain(m.Class) },
	"group": func(m core.Message) string { return m.Fingerprint + "\t" + core.Plain(core.Short(m.Error, 60)) },
}

// messageID completes an id.
func messageID(m core.Message) string {
	return m.ID.String() + "\t" + core.Plain(m.Name+": "+core.Short(m.Error, 60))
}

// completing completes with values of dead letters. Places that do not answer in time are skipped.
func (o *commands) completing(kind string, value func(core.Message) string) cobra.CompletionFunc {
	return func(cmd *cobra.Command, given []string, typed string) ([]cobra.Completion, cobra.ShellCompDirective) {
		return completions(typed, given, core.Mapped(completeFrom(o, cmd, kind, someDeadLetters), value))
	}
}

// someDeadLetters returns the last dead letter of each kind of an outbox, or the first ones of a consumer. Counting the kinds
// of a queue would hide all its messages from other operators.
func someDeadLetters(ctx context.Context, at core.Place) ([]core.Message, error) {
	if at.Kind == core.KindInbox {
		return at.List(ctx, core.Filter{Limit: core.Listed}, false)
	}
	groups, err := at.Groups(ctx, core.Filter{})
	return core.Mapped(groups, func(g core.Group) core.Message { return g.Sample }), err
}

// completingPending completes with values of the first messages that are ready in outboxes.
func (o *commands) completingPending(value func(core.Message) string) cobra.CompletionFunc {
	return func(cmd *cobra.Command, given []string, typed string) ([]cobra.Completion, cobra.ShellCompDirective) {
		held := completeFrom(o, cmd, core.KindOutbox, func(ctx context.Context, at core.Place) ([]core.Message, error) {
			return o.WaitingAt(ctx, at.Name, outbox.WaitingFilter{Limit: core.MaxPerPage})
		})
		return completions(typed, given, core.Mapped(held, func(m core.Message) string { return core.Plain(value(m)) }))
	}
}

// completeFrom asks the places in --from, all at the same time. Places that do not answer in time are skipped.
func completeFrom(o *commands, cmd *cobra.Command, kind string, ask func(context.Context, core.Place) ([]core.Message, error)) []core.Message {
	ctx, cancel := context.WithTimeout(cmd.Context(), completeTimeout)
	defer cancel()
	from, _ := cmd.Flags().GetStringSlice("from")
	choose := o.Chosen
	if retrying(cmd) {
		choose = o.ChosenRetrying
	}
	places, _ := choose(from, kind) // an unknown place completes nothing
	found := make([][]core.Message, len(places))
	var asking sync.WaitGroup
	for i, at := range places {
		asking.Go(func() { found[i], _ = ask(ctx, at) }) // a place that fails completes nothing
	}
	asking.Wait()
	return slices.Concat(found...)
}

// retrying reports whether a command is about messages that wait for an attempt.
func retrying(cmd *cobra.Command) bool {
	if yes, err := cmd.Flags().GetBool("retrying"); err == nil {
		return yes
	}
	_, always := cmd.Annotations["retrying"]
	return always
}

// wantsJSON reports whether --json was given.
func wantsJSON(cmd *cobra.Command) bool {
	yes, err := cmd.Flags().GetBool("json")
	return err == nil && yes
}

// printJSON prints one value, indented.
func printJSON(cmd *cobra.Command, v any) error { return printJSONTo(cmd.OutOrStdout(), v) }

func printJSONTo(w io.Writer, v any) error {
	var text bytes.Buffer
	e := json.NewEncoder(&text)
	e.SetEscapeHTML(false)
	e.SetIndent("", "  ")
	if err := e.Encode(v); err != nil {
		return err
	}
	_, err := w.Write(escaped(text.Bytes()))
	return err
}

// escaped writes characters of a JSON text that change a terminal as \uXXXX: encoding/json leaves those beyond ASCII
// as they are. They occur within strings only, so the value stays the same.
func escaped(text []byte) []byte {
	if !bytes.ContainsFunc(text, unsafeInJSON) {
		return text
	}
	safe := make([]byte, 0, len(text)+64)
	for _, r := range string(text) {
		if unsafeInJSON(r) {
			safe = fmt.Appendf(safe, `\u%04x`, r)
		} else {
			safe = utf8.AppendRune(safe, r)
		}
	}
	return safe
}

func unsafeInJSON(r rune) bool { return r != '\n' && core.ChangesTerminal(r) }

// table prints rows below their heads, in columns. Without rows it prints nothing.
type table struct {
	w    *tabwriter.Writer
	head []string
}

func newTable(w io.Writer, head ...string) *table {
	return &table{tabwriter.NewWriter(w, 0, 0, 2, ' ', 0), head}
}

func (t *table) row(cells ...any) {
	if t.head != nil {
		fmt.Fprintln(t.w, strings.Join(t.head, "\t"))
		t.head = nil
	}
	texts := make([]string, len(cells))
	for i, cell := range cells {
		texts[i] = core.Plain(fmt.Sprint(cell))
	}
	fmt.Fprintln(t.w, strings.Join(texts, "\t"))
}

// printRows prints all as JSON if --json is given, else as a table. row adds one row.
func printRows[T any](cmd *cobra.Command, all []T, row func(*table, T), head ...string) error {
	if wantsJSON(cmd) {
		return printJSON(cmd, all)
	}
	t := newTable(cmd.OutOrStdout(), head...)
	for _, one := range all {
		row(t, one)
	}
	return t.flush()
}

func (t *table) flush() error { return t.w.Flush() }

// below prints a blank line and the table, which writes to w.
func (t *table) below(w io.Writer) error {
	if t.head != nil {
		return nil // no rows
	}
	fmt.Fprintln(w)
	return t.flush()
}

// manyMessages is the smallest number of messages for a progress bar.
const manyMessages = 100

// withProgress draws a progress bar on a terminal's error output if the change takes long: it has many messages, or is
// paced.
func (o *commands) withProgress(cmd *cobra.Command, what string, p core.Place, f core.Filter, c core.Change) (core.Change, func()) {
	nothing := func() {}
	if c.DryRun || !isTerminal(cmd.ErrOrStderr()) {
		return c, nothing
	}
	dry := c
	dry.DryRun, dry.Edit = true, nil
	would, _ := o.Apply(cmd.Context(), what, p, f, dry) // the change itself reports errors
	n := would.Returned + would.Failed
	if n == 0 || n < manyMessages && c.PerSecond == 0 {
		return c, nothing
	}
	bar := progressbar.NewOptions(n, progressbar.OptionSetWriter(cmd.ErrOrStderr()), progressbar.OptionSetDescription(p.Name),
		progressbar.OptionShowCount(), progressbar.OptionSetPredictTime(true), progressbar.OptionClearOnFinish())
	c.Progress = func(r core.Replayed) { _ = bar.Set(min(r.Returned+r.Failed, n)) } // a bar that cannot be drawn is no failure
	return c, func() { _ = bar.Finish() }
}

// atWork shows a description on a terminal's error output until done is called, for work of unknown length.
func atWork(cmd *cobra.Command, what string) (done func()) {
	if !isTerminal(cmd.ErrOrStderr()) {
		return func() {}
	}
	bar := progressbar.NewOptions(-1, progressbar.OptionSetWriter(cmd.ErrOrStderr()), progressbar.OptionSetDescription(what),
		progressbar.OptionSetElapsedTime(true), progressbar.OptionClearOnFinish())
	_ = bar.RenderBlank() // a bar that cannot be drawn is no failure
	return func() { _ = bar.Finish() }
}

// pageShutdown bounds how long the command page waits for running requests.
const pageShutdown = 5 * time.Second

// page serves the page with the rights of the user who runs the command.
func (o *commands) page() *cobra.Command {
	cmd := &cobra.Command{
		Use: "page", Short: "Serve the operator as a web page, until interrupted", Args: noArguments,
		Long: "Serve the operator as a web page, until interrupted. Every visitor acts as the user who runs the command, so keep\n" +
			"an address of this machine, or mount the page in a program that authenticates its visitors.",
	}
	addr := cmd.Flags().String("addr", "127.0.0.1:8970", "`address` to listen on")
	access := addAccessFlags(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if err := core.Validate(core.Change{By: access.By}); err != nil || access.Change && access.By == "" {
			return core.Mistakef("page: --by must be 1 to 128 bytes without control characters")
		}
		handler, err := page.New(o.Config, page.Config{Authorize: func(r *http.Request) (operator.Access, error) { return *access, direct(r) }})
		if err != nil {
			return err
		}
		listener, err := (&net.ListenConfig{}).Listen(cmd.Context(), "tcp", *addr)
		if err != nil {
			return core.Mistakef("page: --addr: %w", err)
		}
		fmt.Fprintf(cmd.OutOrStdout(), "http://%s/\n", listener.Addr())
		return servePage(cmd.Context(), listener, handler)
	}
	return cmd
}

// servePage serves until ctx ends.
func servePage(ctx context.Context, listener net.Listener, handler *page.Page) error {
	server := &http.Server{
		Handler: handler, ReadHeaderTimeout: 10 * time.Second, ReadTimeout: 30 * time.Second, WriteTimeout: 2 * time.Minute,
		IdleTimeout: 2 * time.Minute, MaxHeaderBytes: 128 << 10, ErrorLog: slog.NewLogLogger(slog.Default().Handler(), slog.LevelWarn),
	}
	server.RegisterOnShutdown(handler.Close)
	defer handler.Close() // running actions are logged before the process ends
	ended := make(chan error, 1)
	stop := context.AfterFunc(ctx, func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), pageShutdown)
		defer cancel()
		ended <- server.Shutdown(ctx)
	})
	defer stop()
	if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return <-ended
}

// direct rejects a request whose host is neither an address nor localhost. Otherwise a site could point its name at a
// visitor's machine and count as the page itself: DNS rebinding.
func direct(r *http.Request) error {
	host, _, err := net.SplitHostPort(r.Host)
	if err != nil {
		host = r.Host
	}
	if _, err := netip.ParseAddr(host); err == nil || host == "localhost" {
		return nil
	}
	return fmt.Errorf("operator: unknown host %.100q: open the page by its address", host)
}

// mcp serves agents on standard input and output.
func (o *commands) mcp() *cobra.Command {
	cmd := &cobra.Command{
		Use: "mcp", Short: "Serve agents by the Model Context Protocol, on standard input and output", Args: noArguments,
		Long: "Serve agents by the Model Context Protocol on standard input and output, until the input ends. An agent may read all but\n" +
			"bodies and headers, and change nothing, unless a flag allows it.",
	}
	access := addAccessFlags(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		server, err := agents.New(o.Config, agents.Config{Access: *access})
		if err != nil {
			return core.Mistakef("mcp: --by must be 1 to 128 bytes without control characters")
		}
		return server.Run(cmd.Context(), &mcp.IOTransport{Reader: io.NopCloser(cmd.InOrStdin()), Writer: unclosed{cmd.OutOrStdout()}})
	}
	return cmd
}

// addAccessFlags adds the flags that set the rights of visitors or agents.
func addAccessFlags(cmd *cobra.Command) *operator.Access {
	access := &operator.Access{}
	cmd.Flags().BoolVar(&access.Bodies, "bodies", false, "allow reading the bodies and headers of messages")
	cmd.Flags().BoolVar(&access.Change, "change", false, "allow changes, such as retry and drop")
	cmd.Flags().StringVar(&access.By, "by", osUser(), "`name` of the operator, for the log")
	return access
}

// unclosed is a writer whose owner closes it.
type unclosed struct{ io.Writer }

func (unclosed) Close() error { return nil }
