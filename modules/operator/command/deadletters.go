package command

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/spf13/cobra"

	"github.com/holdfast-go/holdfast/modules/operator"
	"github.com/holdfast-go/holdfast/modules/operator/internal/core"
	"github.com/holdfast-go/holdfast/outbox"
)

// outbox lists the messages in outboxes.
func (o *commands) outbox() *cobra.Command {
	return parent("outbox", "Messages that are waiting, or could not be published",
		o.pending(), o.retrying(core.KindOutbox, "parked", "List messages that wait for their first or next attempt"),
		o.dead(core.KindOutbox, "dead", "List messages that could not be published"))
}

// inbox lists the dead letters of consumers.
func (o *commands) inbox() *cobra.Command {
	return parent("inbox", "Messages that consumers could not process, or not yet",
		o.retrying(core.KindInbox, "retrying", "List messages that wait for their next attempt"),
		o.dead(core.KindInbox, "dead", "List dead letters of consumers"))
}

func (o *commands) dead(kind, use, short string) *cobra.Command {
	cmd := &cobra.Command{Use: use, Short: short, Args: noArguments}
	return o.lists(cmd, kind, o.addSelectFlags(cmd, kind), printDeadLetters)
}

// retrying lists messages that wait for an attempt.
func (o *commands) retrying(kind, use, short string) *cobra.Command {
	cmd := &cobra.Command{Use: use, Short: short, Args: noArguments, Annotations: alwaysRetrying}
	chosen := o.addSelectFlags(cmd, kind)
	chosen.Retrying = true
	return o.lists(cmd, kind, chosen, func(cmd *cobra.Command, messages []core.Message) error {
		if len(chosen.From) == 0 && kind == core.KindInbox {
			for _, name := range o.Unlisted() {
				fmt.Fprintf(cmd.ErrOrStderr(), "%s: its server cannot list messages that wait\n", name)
			}
		}
		return printRetrying(cmd, messages)
	})
}

// lists makes a command that lists the chosen messages.
func (o *commands) lists(cmd *cobra.Command, kind string, chosen *core.Typed, print func(*cobra.Command, []core.Message) error) *cobra.Command {
	var after afterFlag
	if kind == core.KindOutbox {
		after = addAfter(cmd)
	}
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		places, f, err := o.Choose(*chosen, kind)
		if err != nil {
			return err
		}
		if f.After, err = after.cursor(cmd, places); err != nil {
			return err
		}
		f.Limit = cmp.Or(f.Limit, core.Listed)
		found, failed := core.List(cmd.Context(), places, f, false)
		err = print(cmd, found)
		printMore(cmd, places, found, f.Limit)
		return errors.Join(err, failed)
	}
	return cmd
}

func printDeadLetters(cmd *cobra.Command, messages []core.Message) error {
	return printRows(cmd, messages, func(t *table, m core.Message) {
		t.row(m.From, m.ID, m.Name, core.Short(m.Key, 24), m.Class, m.Attempts, core.Moment(m.FailedAt), core.Short(m.Error, 100))
	}, "FROM", "ID", "NAME", "KEY", "CLASS", "ATTEMPTS", "FAILED", "ERROR")
}

func printRetrying(cmd *cobra.Command, messages []core.Message) error {
	return printRows(cmd, messages, func(t *table, m core.Message) {
		t.row(m.From, m.ID, m.Name, core.Short(m.Key, 24), core.Moment(m.DueAt), m.Attempts, m.Class, core.Short(m.Error, 80))
	}, "FROM", "ID", "NAME", "KEY", "DUE", "ATTEMPTS", "CLASS", "ERROR")
}

// groups counts dead letters by kind.
func (o *commands) groups() *cobra.Command {
	cmd := &cobra.Command{
		Use: "groups", Short: "Count dead letters by kind of failure, the most frequent first", Args: noArguments,
		Long: "Count dead letters by kind of failure, the most frequent first.\n\n" +
			"Failures of one kind have the same class, message name, and error type, or error text without its variable parts.\n" +
			"show prints the last one of a kind; retry --group and drop --group take all of them.",
	}
	chosen := o.addSelectFlags(cmd, "")
	addRetrying(cmd, chosen)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		places, f, err := o.Choose(*chosen, "")
		if err != nil {
			return err
		}
		all, failed := core.Groups(cmd.Context(), places, f)
		return errors.Join(printGroups(cmd, all), failed)
	}
	return cmd
}

func printGroups(cmd *cobra.Command, groups []core.Group) error {
	return printRows(cmd, groups, func(t *table, g core.Group) {
		id := g.ID
		if id == "" {
			id = "-" // the rest, beyond the kinds that are counted
		}
		count := fmt.Sprint(g.Count)
		if g.Part {
			count += "+"
		}
		t.row(g.From, id, count, g.Sample.Class, g.Sample.Name, core.Moment(g.First), core.Moment(g.Last), g.Sample.ID, core.Short(g.Sample.Error, 80))
	}, "FROM", "GROUP", "COUNT", "CLASS", "NAME", "FIRST", "LAST", "LAST ID", "ERROR")
}

// show prints everything about one message.
func (o *commands) show() *cobra.Command {
	cmd := &cobra.Command{
		Use: "show ID", Short: "Show everything about a message: its copies, and its story",
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) != 1 {
				return core.Mistakef("%s: needs the id of one message", cmd.CommandPath())
			}
			return nil
		},
	}
	var from []string
	o.addFrom(cmd, "", &from)
	cmd.ValidArgsFunction = first(o.completing("", messageID))
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		story, err := o.Story(cmd.Context(), core.Typed{From: from, IDs: args}, nil)
		if err == nil {
			err = printStory(cmd, story)
		}
		if failed := strings.Join(story.Failed, "; "); failed != "" {
			err = errors.Join(err, errors.New(failed))
		}
		return err
	}
	return cmd
}

// printStory prints the copies, and then the events: the newest is last. It returns an error if no part knows the message.
func printStory(cmd *cobra.Command, s core.Story) error {
	if wantsJSON(cmd) {
		return errors.Join(printJSON(cmd, s), unknown(s))
	}
	out := cmd.OutOrStdout()
	for _, m := range s.Copies {
		printMessage(out, m)
		fmt.Fprintln(out)
	}
	now := time.Now()
	t := newTable(out, "TIME", "AGO", "PART", "EVENT", "DETAIL")
	for _, e := range s.Events {
		at, ago := "now", "-"
		if !e.At.IsZero() {
			at, ago = core.Moment(e.At), core.Distance(now, e.At)
		}
		t.row(at, ago, cmp.Or(e.Part, "-"), e.What, core.Short(e.Detail, 200))
	}
	if err := t.flush(); err != nil {
		return err
	}
	if trace := cmp.Or(s.TraceURL, s.TraceID); trace != "" {
		fmt.Fprintln(out, "trace:", core.Plain(trace))
	}
	for _, why := range s.Missing {
		fmt.Fprintln(out, core.Plain(why))
	}
	return unknown(s)
}

// unknown returns an error if no part knows the message.
func unknown(s core.Story) error {
	if s.Known() {
		return nil
	}
	return fmt.Errorf("no part knows message %s%s", s.ID, core.UnknownHint)
}

func printMessage(w io.Writer, m core.Message) {
	line := func(what, text string) {
		if text != "" && text != "-" {
			fmt.Fprintf(w, "%-14s %s\n", what+":", core.Plain(text))
		}
	}
	line("id", m.ID.String())
	line("name", m.Name)
	line("from", m.From)
	line("key", m.Key)
	line("queue", m.Queue)
	line("transport", m.Transport)
	line("exchange", m.Exchange)
	line("routing key", m.RoutingKey)
	line("sent", core.Moment(m.CreatedAt))
	line("class", m.Class)
	line("error", m.Error)
	line("type", m.ErrorType)
	line("sqlstate", m.SQLState)
	line("group", m.Fingerprint)
	line("attempts", fmt.Sprint(m.Attempts))
	if m.Replays > 0 {
		line("replays", fmt.Sprint(m.Replays))
	}
	line("first failed", core.Moment(m.FirstFailed))
	line("failed", core.Moment(m.FailedAt))
	line("due", core.Moment(m.DueAt))
	line("consumer", m.Consumer)
	for _, a := range m.History {
		line("before", core.Moment(a.At)+" "+a.Consumer+" "+a.Error)
	}
	for _, name := range slices.Sorted(maps.Keys(m.Headers)) {
		line("header", name+"="+m.Headers[name])
	}
	line("content type", m.ContentType)
	line("unreadable", m.Unreadable)
	printBody(w, "body", m.Body, m.BodyBase64)
}

// afterFlag is --after, the cursor after which a list of an outbox continues. The zero afterFlag is for commands without it.
type afterFlag struct{ text *string }

func addAfter(cmd *cobra.Command) afterFlag {
	return afterFlag{cmd.Flags().String("after", "", "continue after this `cursor`, which the last list printed; with several outboxes, --from chooses one")}
}

// cursor returns the cursor in the flag. It needs a single place.
func (f afterFlag) cursor(cmd *cobra.Command, places []core.Place) (string, error) {
	if f.text == nil || *f.text == "" {
		return "", nil
	}
	if len(places) != 1 {
		return "", core.Mistakef("%s: --after: set --from: each outbox has its own list", cmd.CommandPath())
	}
	return *f.text, nil
}

// printMore prints how to continue the list of each place with a full page. It prints to stderr because programs read stdout.
func printMore(cmd *cobra.Command, places []core.Place, messages []core.Message, limit int) {
	for _, at := range places {
		shown, last := 0, ""
		for _, m := range messages {
			if m.From == at.Name {
				shown, last = shown+1, m.Cursor
			}
		}
		switch {
		case shown < limit:
		case last != "":
			fmt.Fprintf(cmd.ErrOrStderr(), "%s: there may be more: --from=%s --after=%s\n", at.Name, at.Name, last)
		default:
			fmt.Fprintf(cmd.ErrOrStderr(), "%s: showing the first %d found, in no order: choose fewer, or raise --limit\n", at.Name, shown)
		}
	}
}

// pending lists messages of outboxes that are ready.
func (o *commands) pending() *cobra.Command {
	cmd := &cobra.Command{Use: "pending", Short: "List messages that are ready, or behind a parked message of their key", Args: noArguments}
	var from []string
	o.addFrom(cmd, core.KindOutbox, &from)
	var f outbox.WaitingFilter
	cmd.Flags().StringVar(&f.Name, "name", "", "only messages of this `name`")
	cmd.Flags().StringVar(&f.Key, "key", "", "only messages of this ordering `key`")
	cmd.Flags().IntVar(&f.Limit, "limit", core.Listed, "at most this many from each outbox")
	after := addAfter(cmd)
	complete(cmd, "name", o.completingPending(func(m core.Message) string { return m.Name }))
	complete(cmd, "key", o.completingPending(func(m core.Message) string { return m.Key }))
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if f.Limit < 1 {
			return core.Mistakef("%s: --limit must be at least 1", cmd.CommandPath())
		}
		places, err := o.Chosen(from, core.KindOutbox)
		if err != nil {
			return err
		}
		if f.After, err = after.cursor(cmd, places); err != nil {
			return err
		}
		found, failed := core.EachPlace(cmd.Context(), places, func(ctx context.Context, p core.Place) ([]core.Message, error) { return o.WaitingAt(ctx, p.Name, f) })
		err = printPending(cmd, found)
		printMore(cmd, places, found, f.Limit)
		return errors.Join(err, failed)
	}
	return cmd
}

func printPending(cmd *cobra.Command, messages []core.Message) error {
	return printRows(cmd, messages, func(t *table, m core.Message) {
		t.row(m.From, m.ID, m.Name, core.Short(m.Key, 24), core.Moment(m.CreatedAt), m.Attempts, core.Short(m.Error, 80))
	}, "FROM", "ID", "NAME", "KEY", "STORED", "ATTEMPTS", "ERROR")
}

// retry sends dead letters again.
func (o *commands) retry() *cobra.Command {
	cmd := &cobra.Command{
		Use: "retry [ID...]", Short: "Send dead letters again",
		Long: "Send dead letters again: an outbox publishes them, a consumer processes them. Their attempts start at zero. Fix the\n" +
			"cause of the failures first. --body and --patch change the bodies; the ids stay, so a message that was processed\n" +
			"after all is not processed again. With --retrying it starts the next attempt of waiting messages now.",
	}
	chosen, changed, all := o.addSelectFlags(cmd, ""), addChangeFlags(cmd), addAll(cmd)
	addRetrying(cmd, chosen)
	cmd.ValidArgsFunction = o.completing("", messageID)
	cmd.Flags().Float64Var(&changed.c.PerSecond, "rate", 0, "at most this many a second (0: unlimited)")
	cmd.Flags().BoolVar(&changed.c.Force, "force", false, "also messages older than the consumers' inbox retention: they may take effect twice")
	edited := addEditFlags(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		e, err := edited.edit(cmd, args)
		if err != nil {
			return err
		}
		changed.c.Edit = e.Function(nil)
		return o.change(cmd, "retry", chosen, changed, *all, args)
	}
	return cmd
}

// drop removes dead letters.
func (o *commands) drop() *cobra.Command {
	cmd := &cobra.Command{Use: "drop [ID...]", Short: "Remove dead letters permanently"}
	chosen, changed, all := o.addSelectFlags(cmd, ""), addChangeFlags(cmd), addAll(cmd)
	addRetrying(cmd, chosen)
	cmd.ValidArgsFunction = o.completing("", messageID)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		return o.change(cmd, "drop", chosen, changed, *all, args)
	}
	return cmd
}

// postpone makes messages wait longer for their next attempt.
func (o *commands) postpone() *cobra.Command {
	cmd := &cobra.Command{
		Use: "postpone [ID...]", Short: "Delay the next attempt of waiting messages", Annotations: alwaysRetrying,
		Long: "Delay the next attempt of the messages that outbox parked and inbox retrying list. The later messages of an\n" +
			"ordering key in an outbox wait, too.",
	}
	chosen, changed, all := o.addSelectFlags(cmd, ""), addChangeFlags(cmd), addAll(cmd)
	chosen.Retrying = true
	var delay seconds
	cmd.Flags().Var(&delay, "for", "`time` from now until the next attempt, at most 24h, such as 30m (required)")
	cmd.ValidArgsFunction = o.completing("", messageID)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if delay == 0 {
			return core.Mistakef("postpone: set --for, such as --for=30m")
		}
		changed.c.Delay = time.Duration(delay)
		return o.change(cmd, core.Postponing, chosen, changed, *all, args)
	}
	return cmd
}

// alwaysRetrying marks a command without --retrying that is about messages that wait for an attempt.
var alwaysRetrying = map[string]string{"retrying": ""}

// addRetrying adds the flag that chooses messages that wait for an attempt.
func addRetrying(cmd *cobra.Command, chosen *core.Typed) {
	cmd.Flags().BoolVar(&chosen.Retrying, "retrying", false, "messages that wait for an attempt, instead of dead letters")
}

func addAll(cmd *cobra.Command) *bool {
	return cmd.Flags().Bool("all", false, "required if nothing else chooses: all of them")
}

func (o *commands) change(cmd *cobra.Command, what string, chosen *core.Typed, flags *changeFlags, all bool, ids []string) error {
	chosen.IDs = ids
	places, f, err := o.Choose(*chosen, "")
	if err != nil {
		return err
	}
	c, err := flags.change()
	if err != nil {
		return err
	}
	if !core.Chooses(f) && !all {
		return core.Mistakef("%s: choose by id, --name, --key, --class, --group, --error, --since, --until or --limit, or set --all", what)
	}
	done, failed := o.ApplyTo(cmd.Context(), what, places, f, c, func(p core.Place, c core.Change) (core.Change, func()) {
		return o.withProgress(cmd, what, p, f, c)
	})
	return errors.Join(printChanged(cmd, what, done), failed, allFound(chosen.Noun(), f, done, failed))
}

// allFound returns an error if fewer messages were found than ids were given. If a place failed, it returns nil.
func allFound(noun string, f core.Filter, done []core.Changed, failed error) error {
	found := 0
	for _, c := range done {
		found += c.Count + c.Outlived + c.Failed
	}
	asked := len(f.IDs)
	switch {
	case failed != nil || found >= asked:
		return nil
	case asked == 1:
		return fmt.Errorf("there is no %s %s", noun, f.IDs[0])
	}
	return fmt.Errorf("%d of the %d ids are no %ss", asked-found, asked, noun)
}

// upkeepNoted logs an action that a service also does by itself. Without --by and --reason it is upkeep, for example of cron.
// Upkeep is logged only if it changed something, so that actions of people stay visible. It also runs if the database role
// has no right to the log, or if there is no log yet.
func (o *commands) upkeepNoted(cmd *cobra.Command, a operator.Action, do func() (int, error)) error {
	if !attended(cmd) {
		n, err := do()
		if n == 0 {
			return err
		}
		do = func() (int, error) { return n, err }
	}
	started := false
	err := o.Noted(cmd.Context(), a, func() (int, error) {
		started = true
		return do()
	})
	if started || err == nil {
		return err
	}
	answer, ok := errors.AsType[*pgconn.PgError](err)
	if ok && (answer.Code == missingTable || answer.Code == insufficientPrivilege) {
		fmt.Fprintf(cmd.ErrOrStderr(), "%s: not logged: %s\n", a.What, core.Plain(core.OneLine(err)))
		err = nil
	} else if attended(cmd) {
		return err
	}
	_, failed := do()
	return errors.Join(failed, err)
}

// attended reports whether somebody gave --by or --reason.
func attended(cmd *cobra.Command) bool {
	return cmd.Flags().Changed("by") || cmd.Flags().Changed("reason")
}

// insufficientPrivilege is the SQLSTATE of a missing right.
const insufficientPrivilege = "42501"

func printChanged(cmd *cobra.Command, what string, done []core.Changed) error {
	if wantsJSON(cmd) {
		return printJSON(cmd, done)
	}
	verb := core.Done(what)
	for _, c := range done {
		v := verb
		if c.DryRun {
			v = "would be " + verb
		}
		fmt.Fprintf(cmd.OutOrStdout(), "%s: %d %s", c.From, c.Count, v)
		if c.Outlived > 0 {
			fmt.Fprintf(cmd.OutOrStdout(), ", %d too old (--force)", c.Outlived)
		}
		if c.Failed > 0 {
			fmt.Fprintf(cmd.OutOrStdout(), ", %d failed", c.Failed)
		}
		fmt.Fprintln(cmd.OutOrStdout())
	}
	return nil
}
