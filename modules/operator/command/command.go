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

// addSelectFlags adds the flags that choose dead letters to a command about the places of a kind, or about all.
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
	flags.IntVar(&t.Limit, "limit", 0, "at most so many of each place (of groups: so many groups)")
	for flag, value := range flagValues {
		complete(cmd, flag, o.completing(kind, value))
	}
	return t
}

// addFrom adds --from to a command about the places of a kind, or about all.
func (o *commands) addFrom(cmd *cobra.Command, kind string, names *[]string) {
	known := o.PlaceNames(kind)
	usage := "only of this `place`: " + strings.Join(known, ", ")
	if kind == "" {
		usage += ", or all outboxes (outbox) or consumers (inbox)"
		known = append(known, core.KindOutbox, core.KindInbox)
	}
	cmd.Flags().StringSliceVar(names, "from", nil, usage)
	complete(cmd, "from", several(known))
}

// changeFlags say who changes something, and how.
type changeFlags struct{ c core.Change }

func addChangeFlags(cmd *cobra.Command) *changeFlags {
	return addNotedFlags(cmd, "only tell what would be done")
}

// addNotedFlags are those of a command that says what its dry run tells.
func addNotedFlags(cmd *cobra.Command, dryRun string) *changeFlags {
	f := &changeFlags{}
	flags := cmd.Flags()
	flags.StringVar(&f.c.By, "by", osUser(), "`who` does it; kept in the log")
	flags.StringVar(&f.c.Reason, "reason", "", "`why`; kept, too")
	flags.BoolVar(&f.c.DryRun, "dry-run", false, dryRun)
	return f
}

// editFlags replace bodies.
type editFlags struct{ file, patch string }

func addEditFlags(cmd *cobra.Command) *editFlags {
	f := &editFlags{}
	cmd.Flags().StringVar(&f.file, "body", "", "the one message gets the content of this `file` as its body (-: of the standard input)")
	cmd.Flags().StringVar(&f.patch, "patch", "", "the bodies are changed by this JSON merge `patch` (RFC 7396), such as '{\"currency\":\"EUR\",\"total\":null}'")
	return f
}

// edit is what the flags say of the messages that are named.
func (f *editFlags) edit(cmd *cobra.Command, ids []string) (e core.Edit, err error) {
	e.Patch = f.patch
	if f.file != "" {
		if len(ids) != 1 {
			return e, core.Mistakef("--body: name the one message that gets it")
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

// readFile reads what a body may have, and a byte more.
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

// change is what the flags say.
func (f *changeFlags) change() (core.Change, error) {
	if f.c.By == "" && !f.c.DryRun {
		return f.c, core.Mistakef("say --by")
	}
	if err := core.Validate(f.c); err != nil {
		return f.c, core.Mistakef("--%w", err)
	}
	return f.c, nil
}

// osUser is who runs the program: in a container maybe a number without a name.
func osUser() string {
	u, err := user.Current()
	if err != nil || u.Username == "" {
		return fmt.Sprintf("uid %d", os.Getuid())
	}
	return u.Username
}

// seconds is a duration whose bare numbers are seconds.
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

// size is a number of bytes, with K, M or G behind it or nothing.
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
		return fmt.Errorf("want bytes, or a number with K, M or G behind it")
	}
	*s = size(n << shift)
	return nil
}

// completeTimeout bounds the look for what completes a word: somebody has pressed a key.
const completeTimeout = 3 * time.Second

// complete says what completes the value of a flag.
func complete(cmd *cobra.Command, flag string, with cobra.CompletionFunc) {
	_ = cmd.RegisterFlagCompletionFunc(flag, with) // the flag is there, and has none yet
}

// noFiles has nothing completed where nothing else is: by themselves shells complete the names of files.
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

// among completes what is one of some, and not given yet.
func among(known []string) cobra.CompletionFunc {
	return func(_ *cobra.Command, given []string, begun string) ([]cobra.Completion, cobra.ShellCompDirective) {
		return completions(begun, given, known)
	}
}

// several completes each of a list that is parted by commas.
func several(known []string) cobra.CompletionFunc {
	return func(_ *cobra.Command, _ []string, begun string) ([]cobra.Completion, cobra.ShellCompDirective) {
		at := strings.LastIndex(begun, ",") + 1
		found, directive := completions(begun[at:], strings.Split(begun[:at], ","), known)
		return core.Mapped(found, func(one cobra.Completion) cobra.Completion { return begun[:at] + one }), directive
	}
}

// first completes the first argument alone.
func first(with cobra.CompletionFunc) cobra.CompletionFunc {
	return func(cmd *cobra.Command, given []string, begun string) ([]cobra.Completion, cobra.ShellCompDirective) {
		if len(given) > 0 {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		return with(cmd, given, begun)
	}
}

// completions are those of the known texts that begin so, each once, without what was given. Behind a tab a text has what is
// shown beside it.
func completions(begun string, given, known []string) ([]cobra.Completion, cobra.ShellCompDirective) {
	values := map[string]bool{}
	for _, text := range known {
		text = strings.ReplaceAll(text, "\n", " ")
		word, _, _ := strings.Cut(text, "\t")
		if word != "" && strings.HasPrefix(word, begun) && !slices.Contains(given, word) {
			values[text] = true
		}
	}
	return slices.Sorted(maps.Keys(values)), cobra.ShellCompDirectiveNoFileComp
}

// flagValues complete the flags that choose dead letters with what some of them have.
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

// completing completes with what the dead letters have of the places of a kind, or of all, that answer in time.
func (o *commands) completing(kind string, value func(core.Message) string) cobra.CompletionFunc {
	return func(cmd *cobra.Command, given []string, begun string) ([]cobra.Completion, cobra.ShellCompDirective) {
		return completions(begun, given, core.Mapped(completeFrom(o, cmd, kind, someDeadLetters), value))
	}
}

// someDeadLetters are the last one of each kind of an outbox, and the first ones of a consumer: to count the kinds of a queue takes all
// its messages away from whoever is fixing them.
func someDeadLetters(ctx context.Context, at core.Place) ([]core.Message, error) {
	if at.Kind == core.KindInbox {
		return at.List(ctx, core.Filter{Limit: core.Listed}, false)
	}
	groups, err := at.Groups(ctx, core.Filter{})
	return core.Mapped(groups, func(g core.Group) core.Message { return g.Sample }), err
}

// completingWaiting completes with what the first messages have that outboxes hold.
func (o *commands) completingWaiting(parked bool, value func(core.Message) string) cobra.CompletionFunc {
	return func(cmd *cobra.Command, given []string, begun string) ([]cobra.Completion, cobra.ShellCompDirective) {
		held := completeFrom(o, cmd, core.KindOutbox, func(ctx context.Context, at core.Place) ([]core.Message, error) {
			return o.WaitingAt(ctx, at.Name, outbox.WaitingFilter{Parked: parked, Limit: core.MaxPerPage})
		})
		return completions(begun, given, core.Mapped(held, func(m core.Message) string { return core.Plain(value(m)) }))
	}
}

// completeFrom asks the places that --from names, all at the same time, as far as they answer in time.
func completeFrom(o *commands, cmd *cobra.Command, kind string, ask func(context.Context, core.Place) ([]core.Message, error)) []core.Message {
	ctx, cancel := context.WithTimeout(cmd.Context(), completeTimeout)
	defer cancel()
	from, _ := cmd.Flags().GetStringSlice("from")
	places, _ := o.Chosen(from, kind) // what is no place completes nothing
	found := make([][]core.Message, len(places))
	var asking sync.WaitGroup
	for i, at := range places {
		asking.Go(func() { found[i], _ = ask(ctx, at) }) // what does not answer completes nothing
	}
	asking.Wait()
	return slices.Concat(found...)
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

// escaped writes those characters of a JSON text as \uXXXX that change a terminal: encoding/json leaves
// the ones beyond ASCII as they are. They occur within strings only, so the value stays the same.
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

// table prints rows below their heads, in columns. Nothing is printed where there are no rows.
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

// printRows prints all as JSON if --json is given, and else as a table. Row adds the row of one.
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

// below prints a table below others, after a line between. It is w's.
func (t *table) below(w io.Writer) error {
	if t.head != nil {
		return nil // no rows
	}
	fmt.Fprintln(w)
	return t.flush()
}

// manyMessages is how many messages are worth a bar.
const manyMessages = 100

// withProgress has a change draw a bar on a terminal's error output, where it takes long: there are many
// messages, or they are paced.
func (o *commands) withProgress(cmd *cobra.Command, what string, p core.Place, f core.Filter, c core.Change) (core.Change, func()) {
	nothing := func() {}
	if c.DryRun || !isTerminal(cmd.ErrOrStderr()) {
		return c, nothing
	}
	dry := c
	dry.DryRun, dry.Edit = true, nil
	would, _ := o.Apply(cmd.Context(), what, p, f, dry) // the change itself will say what is wrong
	n := would.Returned + would.Failed
	if n == 0 || n < manyMessages && c.PerSecond == 0 {
		return c, nothing
	}
	bar := progressbar.NewOptions(n, progressbar.OptionSetWriter(cmd.ErrOrStderr()), progressbar.OptionSetDescription(p.Name),
		progressbar.OptionShowCount(), progressbar.OptionSetPredictTime(true), progressbar.OptionClearOnFinish())
	c.Progress = func(r core.Replayed) { _ = bar.Set(min(r.Returned+r.Failed, n)) } // a bar that cannot be drawn is no failure
	return c, func() { _ = bar.Finish() }
}

// atWork shows on a terminal's error output what is worked on until done is called, for work of unknown length.
func atWork(cmd *cobra.Command, what string) (done func()) {
	if !isTerminal(cmd.ErrOrStderr()) {
		return func() {}
	}
	bar := progressbar.NewOptions(-1, progressbar.OptionSetWriter(cmd.ErrOrStderr()), progressbar.OptionSetDescription(what),
		progressbar.OptionSetElapsedTime(true), progressbar.OptionClearOnFinish())
	_ = bar.RenderBlank() // a bar that cannot be drawn is no failure
	return func() { _ = bar.Finish() }
}

// pageShutdown bounds how long the command page waits for answers that are under way.
const pageShutdown = 5 * time.Second

// page serves the page to whoever runs the command.
func (o *commands) page() *cobra.Command {
	cmd := &cobra.Command{
		Use: "page", Short: "Serve the operator as a web page, until interrupted", Args: noArguments,
		Long: "Serve the operator as a web page, until interrupted. Everybody who reaches the address is who runs the command, so\n" +
			"leave it at one of this machine, or mount the page in a program that asks who its visitors are.",
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
	defer handler.Close() // what it has begun is noted before the process ends
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

// direct refuses a request under a name that is not this machine's own. A site that has its name lead to a
// visitor's own machine would otherwise count as the page itself: DNS rebinding.
func direct(r *http.Request) error {
	host, _, err := net.SplitHostPort(r.Host)
	if err != nil {
		host = r.Host
	}
	if _, err := netip.ParseAddr(host); err == nil || host == "localhost" {
		return nil
	}
	return fmt.Errorf("operator: the page has no name %.100q: use its address", host)
}

// mcp serves agents on the standard input and output.
func (o *commands) mcp() *cobra.Command {
	cmd := &cobra.Command{
		Use: "mcp", Short: "Serve agents by the Model Context Protocol, on the standard input and output", Args: noArguments,
		Long: "Serve agents by the Model Context Protocol, on the standard input and output, until that ends. An agent may read all but\n" +
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

// addAccessFlags adds the flags that say what others may do.
func addAccessFlags(cmd *cobra.Command) *operator.Access {
	access := &operator.Access{}
	cmd.Flags().BoolVar(&access.Bodies, "bodies", false, "allow to look at the bodies and the headers of messages")
	cmd.Flags().BoolVar(&access.Change, "change", false, "allow to change something, such as to retry and drop dead letters")
	cmd.Flags().StringVar(&access.By, "by", osUser(), "`who` does it; kept in the log")
	return access
}

// unclosed is a writer of somebody else.
type unclosed struct{ io.Writer }

func (unclosed) Close() error { return nil }
