package operator

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"

	"github.com/google/uuid"
	"github.com/spf13/cobra"
)

// outbox lists what is in outboxes.
func (o *Operator) outbox() *cobra.Command {
	return parent("outbox", "Messages that wait to be published, or could not be",
		o.waiting("pending", "List messages that are ready to be published, and those behind a parked one of their key", false),
		o.waiting("parked", "List messages that wait for their first or their next attempt", true),
		o.dead(kindOutbox, "dead", "List messages that could not be published"))
}

// inbox lists what consumers have given up.
func (o *Operator) inbox() *cobra.Command {
	return parent("inbox", "Messages that consumers could not process", o.dead(kindInbox, "dead", "List messages that consumers have given up"))
}

func (o *Operator) dead(kind, use, short string) *cobra.Command {
	cmd := &cobra.Command{Use: use, Short: short, Args: noArguments}
	from, selected := o.addFrom(cmd, kind), o.addSelectFlags(cmd, kind)
	var after afterFlag
	if kind == kindOutbox {
		after = addAfter(cmd)
	}
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		s, err := selected.selection(nil)
		if err != nil {
			return err
		}
		places, err := o.chosen(from, kind)
		if err != nil {
			return err
		}
		if s.Behind, err = after.cursor(cmd, places); err != nil {
			return err
		}
		if s.Limit == 0 {
			s.Limit = listed
		}
		letters, failed := eachPlace(cmd.Context(), places, func(ctx context.Context, p place) ([]letter, error) { return p.list(ctx, s, false) })
		err = printLetters(cmd, letters)
		printMore(cmd, places, letters, s.Limit)
		return errors.Join(err, failed)
	}
	return cmd
}

// eachPlace gathers what the places have. One that cannot be asked does not keep the others from telling.
func eachPlace[T any](ctx context.Context, places []place, ask func(context.Context, place) ([]T, error)) ([]T, error) {
	all := []T{} // not null in JSON
	var failed []error
	for _, p := range places {
		found, err := ask(ctx, p)
		all = append(all, found...)
		if err != nil {
			failed = append(failed, fmt.Errorf("%s: %w", p.name, err))
		}
	}
	return all, errors.Join(failed...)
}

func printLetters(cmd *cobra.Command, letters []letter) error {
	if wantsJSON(cmd) {
		return printJSON(cmd, letters)
	}
	t := newTable(cmd.OutOrStdout(), "FROM", "ID", "NAME", "KEY", "CLASS", "ATTEMPTS", "FAILED", "ERROR")
	for _, l := range letters {
		t.row(l.From, l.ID, l.Name, short(l.Key, 24), l.Class, l.Attempts, moment(l.FailedAt), short(l.Error, 100))
	}
	return t.flush()
}

// groups counts dead letters by kind.
func (o *Operator) groups() *cobra.Command {
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
		places, err := o.chosen(from, "")
		if err != nil {
			return err
		}
		all, failed := eachPlace(cmd.Context(), places, func(ctx context.Context, p place) ([]group, error) { return p.groups(ctx, s) })
		slices.SortStableFunc(all, func(a, b group) int { return b.Count - a.Count })
		return errors.Join(printGroups(cmd, all), failed)
	}
	return cmd
}

func printGroups(cmd *cobra.Command, groups []group) error {
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
		t.row(g.From, id, count, g.Sample.Class, g.Sample.Name, moment(g.First), moment(g.Last), g.Sample.ID, short(g.Sample.Error, 80))
	}
	return t.flush()
}

// show prints all that is known of one dead letter.
func (o *Operator) show() *cobra.Command {
	cmd := &cobra.Command{
		Use: "show ID", Short: "Show all that is known of a dead letter",
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) != 1 {
				return usagef("%s: say the id of one dead letter", cmd.CommandPath())
			}
			return nil
		},
	}
	from := o.addFrom(cmd, "")
	cmd.ValidArgsFunction = first(o.completing("", letterID))
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		id, err := uuid.Parse(args[0])
		if err != nil {
			return usagef("%.40q is not an id", args[0])
		}
		places, err := o.chosen(from, "")
		if err != nil {
			return err
		}
		one := selection{IDs: []uuid.UUID{id}}
		letters, failed := eachPlace(cmd.Context(), places, func(ctx context.Context, p place) ([]letter, error) { return p.list(ctx, one, true) })
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

func printLetter(w io.Writer, l letter) {
	line := func(what, text string) {
		if text != "" && text != "-" {
			fmt.Fprintf(w, "%-14s %s\n", what+":", plain(text))
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
	line("sent", moment(l.CreatedAt))
	line("class", l.Class)
	line("error", l.Error)
	line("type", l.ErrorType)
	line("sqlstate", l.SQLState)
	line("group", l.Fingerprint)
	line("attempts", fmt.Sprint(l.Attempts))
	if l.Replays > 0 {
		line("replays", fmt.Sprint(l.Replays))
	}
	line("first failed", moment(l.FirstFailed))
	line("failed", moment(l.FailedAt))
	line("consumer", l.Consumer)
	for _, a := range l.History {
		line("before", moment(a.At)+" "+a.Consumer+" "+a.Error)
	}
	for _, name := range slices.Sorted(maps.Keys(l.Headers)) {
		line("header", name+"="+l.Headers[name])
	}
	line("content type", l.ContentType)
	line("unreadable", l.Unreadable)
	printBody(w, "body", l.Body, l.BodyBase64)
}
