package command

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"

	"github.com/google/uuid"
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
	from, selected := o.addFrom(cmd, kind), o.addSelectFlags(cmd, kind)
	var after afterFlag
	if kind == core.KindOutbox {
		after = addAfter(cmd)
	}
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		s, err := selected.selection(nil)
		if err != nil {
			return err
		}
		places, err := o.Chosen(from.names, kind)
		if err != nil {
			return err
		}
		if s.Behind, err = after.cursor(cmd, places); err != nil {
			return err
		}
		if s.Limit == 0 {
			s.Limit = core.Listed
		}
		letters, failed := core.EachPlace(cmd.Context(), places, func(ctx context.Context, p core.Place) ([]core.Letter, error) { return p.List(ctx, s, false) })
		err = printLetters(cmd, letters)
		printMore(cmd, places, letters, s.Limit)
		return errors.Join(err, failed)
	}
	return cmd
}

func printLetters(cmd *cobra.Command, letters []core.Letter) error {
	if wantsJSON(cmd) {
		return printJSON(cmd, letters)
	}
	t := newTable(cmd.OutOrStdout(), "FROM", "ID", "NAME", "KEY", "CLASS", "ATTEMPTS", "FAILED", "ERROR")
	for _, l := range letters {
		t.row(l.From, l.ID, l.Name, core.Short(l.Key, 24), l.Class, l.Attempts, core.Moment(l.FailedAt), core.Short(l.Error, 100))
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
	from, selected := o.addFrom(cmd, ""), o.addSelectFlags(cmd, "")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		s, err := selected.selection(nil)
		if err != nil {
			return err
		}
		places, err := o.Chosen(from.names, "")
		if err != nil {
			return err
		}
		all, failed := core.EachPlace(cmd.Context(), places, func(ctx context.Context, p core.Place) ([]core.Group, error) { return p.Groups(ctx, s) })
		slices.SortStableFunc(all, func(a, b core.Group) int { return b.Count - a.Count })
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
	from := o.addFrom(cmd, "")
	cmd.ValidArgsFunction = first(o.completing("", letterID))
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		id, err := uuid.Parse(args[0])
		if err != nil {
			return core.Mistakef("%.40q is not an id", args[0])
		}
		places, err := o.Chosen(from.names, "")
		if err != nil {
			return err
		}
		one := core.Selection{IDs: []uuid.UUID{id}}
		letters, failed := core.EachPlace(cmd.Context(), places, func(ctx context.Context, p core.Place) ([]core.Letter, error) { return p.List(ctx, one, true) })
		if len(letters) == 0 {
			if failed != nil {
				return failed
			}
			return fmt.Errorf("there is no dead letter %s", id)
		}
		if wantsJSON(cmd) {
			return errors.Join(printJSON(cmd, letters), failed)
		}
		for _, l := range letters {
			printLetter(cmd.OutOrStdout(), l)
		}
		return failed
	}
	return cmd
}

func printLetter(w io.Writer, l core.Letter) {
	line := func(what, text string) {
		if text != "" && text != "-" {
			fmt.Fprintf(w, "%-14s %s\n", what+":", core.Plain(text))
		}
	}
	line("id", l.ID.String())
	line("name", l.Name)
	line("from", l.From)
	line("key", l.Key)
	line("queue", l.Queue)
	line("transport", l.Transport)
	line("exchange", l.Exchange)
	line("routing key", l.RoutingKey)
	line("sent", core.Moment(l.CreatedAt))
	line("class", l.Class)
	line("error", l.Error)
	line("type", l.ErrorType)
	line("sqlstate", l.SQLState)
	line("group", l.Fingerprint)
	line("attempts", fmt.Sprint(l.Attempts))
	if l.Replays > 0 {
		line("replays", fmt.Sprint(l.Replays))
	}
	line("first failed", core.Moment(l.FirstFailed))
	line("failed", core.Moment(l.FailedAt))
	line("consumer", l.Consumer)
	for _, a := range l.History {
		line("before", core.Moment(a.At)+" "+a.Consumer+" "+a.Error)
	}
	for _, name := range slices.Sorted(maps.Keys(l.Headers)) {
		line("header", name+"="+l.Headers[name])
	}
	line("content type", l.ContentType)
	line("unreadable", l.Unreadable)
	printBody(w, "body", l.Body, l.BodyBase64)
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
func printMore(cmd *cobra.Command, places []core.Place, letters []core.Letter, limit int) {
	for _, at := range places {
		shown, last := 0, ""
		for _, l := range letters {
			if l.From == at.Name {
				shown, last = shown+1, l.Cursor
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
	from := o.addFrom(cmd, core.KindOutbox)
	f := outbox.WaitingFilter{Parked: parked}
	cmd.Flags().StringVar(&f.Name, "name", "", "only messages of this `name`")
	cmd.Flags().StringVar(&f.Key, "key", "", "only messages of this ordering `key`")
	cmd.Flags().IntVar(&f.Limit, "limit", core.Listed, "at most so many of each outbox")
	after := addAfter(cmd)
	complete(cmd, "name", o.completingWaiting(parked, func(l core.Letter) string { return l.Name }))
	complete(cmd, "key", o.completingWaiting(parked, func(l core.Letter) string { return l.Key }))
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if f.Limit < 1 {
			return core.Mistakef("%s: --limit must be at least 1", cmd.CommandPath())
		}
		places, err := o.Chosen(from.names, core.KindOutbox)
		if err != nil {
			return err
		}
		if f.After, err = after.cursor(cmd, places); err != nil {
			return err
		}
		letters, failed := core.EachPlace(cmd.Context(), places, func(ctx context.Context, p core.Place) ([]core.Letter, error) { return o.WaitingAt(ctx, p.Name, f) })
		err = printWaiting(cmd, letters)
		printMore(cmd, places, letters, f.Limit)
		return errors.Join(err, failed)
	}
	return cmd
}

func printWaiting(cmd *cobra.Command, letters []core.Letter) error {
	if wantsJSON(cmd) {
		return printJSON(cmd, letters)
	}
	t := newTable(cmd.OutOrStdout(), "FROM", "ID", "NAME", "KEY", "STORED", "DUE", "ATTEMPTS", "ERROR")
	for _, l := range letters {
		t.row(l.From, l.ID, l.Name, core.Short(l.Key, 24), core.Moment(l.CreatedAt), core.Moment(l.DueAt), l.Attempts, core.Short(l.Error, 80))
	}
	return t.flush()
}
