package command

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"

	"github.com/spf13/cobra"

	"github.com/holdfast-go/holdfast/modules/operator/internal/core"
	"github.com/holdfast-go/holdfast/outbox"
)

// outbox lists what is in outboxes.
func (o *commands) outbox() *cobra.Command {
	return parent("outbox", "Messages that wait to be published, or could not be",
		o.waiting("pending", "List messages that are ready to be published, and those behind a parked one of their key", false),
		o.waiting("parked", "List messages that wait for their first or their next attempt", true),
		o.dead(core.KindOutbox, "dead", "List messages that could not be published"))
}

// inbox lists what consumers have given up.
func (o *commands) inbox() *cobra.Command {
	return parent("inbox", "Messages that consumers could not process", o.dead(core.KindInbox, "dead", "List messages that consumers have given up"))
}

func (o *commands) dead(kind, use, short string) *cobra.Command {
	cmd := &cobra.Command{Use: use, Short: short, Args: noArguments}
	chosen := o.addSelectFlags(cmd, kind)
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
		err = printDeadLetters(cmd, found)
		printMore(cmd, places, found, f.Limit)
		return errors.Join(err, failed)
	}
	return cmd
}

func printDeadLetters(cmd *cobra.Command, messages []core.Message) error {
	if wantsJSON(cmd) {
		return printJSON(cmd, messages)
	}
	t := newTable(cmd.OutOrStdout(), "FROM", "ID", "NAME", "KEY", "CLASS", "ATTEMPTS", "FAILED", "ERROR")
	for _, m := range messages {
		t.row(m.From, m.ID, m.Name, core.Short(m.Key, 24), m.Class, m.Attempts, core.Moment(m.FailedAt), core.Short(m.Error, 100))
	}
	return t.flush()
}

// groups counts dead letters by kind.
func (o *commands) groups() *cobra.Command {
	cmd := &cobra.Command{
		Use: "groups", Short: "Count dead letters by the kind of their failure, the most frequent first", Args: noArguments,
		Long: "Count dead letters by the kind of their failure, the most frequent first.\n\n" +
			"A kind is what the failures have in common: their class, the type of the error or its text without what changes, and the\n" +
			"message's name. show tells more of its last one; retry --group and drop --group take all of a kind.",
	}
	chosen := o.addSelectFlags(cmd, "")
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
	if wantsJSON(cmd) {
		return printJSON(cmd, groups)
	}
	t := newTable(cmd.OutOrStdout(), "FROM", "GROUP", "COUNT", "CLASS", "NAME", "FIRST", "LAST", "ID OF THE LAST", "ERROR")
	for _, g := range groups {
		id := g.ID
		if id == "" {
			id = "-" // those beyond the most that are told apart
		}
		count := fmt.Sprint(g.Count)
		if g.Part {
			count += "+"
		}
		t.row(g.From, id, count, g.Sample.Class, g.Sample.Name, core.Moment(g.First), core.Moment(g.Last), g.Sample.ID, core.Short(g.Sample.Error, 80))
	}
	return t.flush()
}

// show prints all that is known of one dead letter.
func (o *commands) show() *cobra.Command {
	cmd := &cobra.Command{
		Use: "show ID", Short: "Show all that is known of a dead letter",
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) != 1 {
				return core.Mistakef("%s: say the id of one dead letter", cmd.CommandPath())
			}
			return nil
		},
	}
	var chosen core.Typed
	o.addFrom(cmd, "", &chosen.From)
	cmd.ValidArgsFunction = first(o.completing("", messageID))
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		chosen.IDs = args
		places, one, err := o.Choose(chosen, "")
		if err != nil {
			return err
		}
		found, failed := core.List(cmd.Context(), places, one, true)
		switch {
		case len(found) == 0 && failed == nil:
			return fmt.Errorf("there is no dead letter %s", args[0])
		case len(found) == 0:
			return failed
		case wantsJSON(cmd):
			return errors.Join(printJSON(cmd, found), failed)
		}
		for _, m := range found {
			printMessage(cmd.OutOrStdout(), m)
		}
		return failed
	}
	return cmd
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

// afterFlag is --after: where a list of an outbox goes on. The zero afterFlag is that of a command without it.
type afterFlag struct{ text *string }

func addAfter(cmd *cobra.Command) afterFlag {
	return afterFlag{cmd.Flags().String("after", "", "go on behind this `cursor`, as the list before told it; --from says of which outbox, where there are several")}
}

// cursor is what the flag says, of the one place that is listed.
func (f afterFlag) cursor(cmd *cobra.Command, places []core.Place) (string, error) {
	if f.text == nil || *f.text == "" {
		return "", nil
	}
	if len(places) != 1 {
		return "", core.Mistakef("%s: --after: say --from: each outbox has its own list", cmd.CommandPath())
	}
	return *f.text, nil
}

// printMore says on stderr of each place that has filled its page how to go on: what is printed is read by programs, too.
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
			fmt.Fprintf(cmd.ErrOrStderr(), "%s: the first %d that were found; they have no order to go on in: choose fewer, or raise --limit\n", at.Name, shown)
		}
	}
}

// waiting lists messages that are not published.
func (o *commands) waiting(use, short string, parked bool) *cobra.Command {
	cmd := &cobra.Command{Use: use, Short: short, Args: noArguments}
	var from []string
	o.addFrom(cmd, core.KindOutbox, &from)
	f := outbox.WaitingFilter{Parked: parked}
	cmd.Flags().StringVar(&f.Name, "name", "", "only messages of this `name`")
	cmd.Flags().StringVar(&f.Key, "key", "", "only messages of this ordering `key`")
	cmd.Flags().IntVar(&f.Limit, "limit", core.Listed, "at most so many of each outbox")
	after := addAfter(cmd)
	complete(cmd, "name", o.completingWaiting(parked, func(m core.Message) string { return m.Name }))
	complete(cmd, "key", o.completingWaiting(parked, func(m core.Message) string { return m.Key }))
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
		err = printWaiting(cmd, found)
		printMore(cmd, places, found, f.Limit)
		return errors.Join(err, failed)
	}
	return cmd
}

func printWaiting(cmd *cobra.Command, messages []core.Message) error {
	if wantsJSON(cmd) {
		return printJSON(cmd, messages)
	}
	t := newTable(cmd.OutOrStdout(), "FROM", "ID", "NAME", "KEY", "STORED", "DUE", "ATTEMPTS", "ERROR")
	for _, m := range messages {
		t.row(m.From, m.ID, m.Name, core.Short(m.Key, 24), core.Moment(m.CreatedAt), core.Moment(m.DueAt), m.Attempts, core.Short(m.Error, 80))
	}
	return t.flush()
}
