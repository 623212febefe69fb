package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/examples/reservation/internal/postgres"
	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/outbox"
)

// deadFilter is what the flags of dead choose.
type deadFilter struct {
	from, name, class  string
	group              string // a fingerprint, which only the inbox has
	ids                []uuid.UUID
	limit              int
	all, force, dryRun bool
	by, reason         string // who changes them, and why
}

// deadStores are the two places where messages end that were given up.
type deadStores struct {
	outbox outbox.DeadLetters
	inbox  inbox.DeadLetters
	pool   *pgxpool.Pool // for the audit of the inbox
}

// runDead lists, shows, retries and removes dead letters of the outbox (not published) and of the inbox (not consumed).
func runDead(ctx context.Context, c *commandContext, args []string) (int, error) {
	if len(args) == 0 {
		return exitUsage, usagef("dead: say list, groups, show, retry, remove or audit")
	}
	verb := args[0]
	if verb == "-h" || verb == "-help" || verb == "--help" {
		fmt.Fprintln(c.stdout, "Usage: reservation dead list|groups|show|retry|remove|audit [flags]; dead list -h and so on tell the flags")
		return exitOK, nil
	}
	if verb == "audit" {
		return runDeadAudit(ctx, c, args[1:])
	}
	f, err := parseDeadFilter(c, verb, args[1:])
	if err != nil {
		return exitUsage, err
	}
	stores := newDeadStores(c)
	switch verb {
	case "list":
		err = stores.list(ctx, c.stdout, f, false)
	case "show":
		err = stores.list(ctx, c.stdout, f, true)
	case "groups":
		err = stores.groups(ctx, c.stdout, f)
	case "retry":
		err = stores.retry(ctx, c.stdout, f)
	case "remove":
		err = stores.change(ctx, c.stdout, f, "removed", func(ctx context.Context, filter outbox.Filter) (int, error) {
			return stores.outbox.Remove(ctx, filter, f.by, f.reason)
		}, stores.recorded(f, verb, func(ctx context.Context, filter inbox.Filter) (int, error) {
			return stores.inbox.Remove(ctx, filter, f.by, f.reason)
		}))
	}
	if err != nil {
		return exitFailed, err
	}
	return exitOK, nil
}

// retry sends messages again, or tells how many it would.
func (s deadStores) retry(ctx context.Context, w io.Writer, f deadFilter) error {
	inInbox := func(ctx context.Context, filter inbox.Filter) (int, error) {
		replayed, err := s.inbox.Replay(ctx, filter, inbox.Replay{By: f.by, Reason: f.reason, Force: f.force, DryRun: f.dryRun})
		return replayed.Returned, err
	}
	done := "would be retried"
	if !f.dryRun {
		done, inInbox = "retried", s.recorded(f, "retry", inInbox)
	}
	return s.change(ctx, w, f, done, func(ctx context.Context, filter outbox.Filter) (int, error) {
		replayed, err := s.outbox.Replay(ctx, filter, outbox.Replay{By: f.by, Reason: f.reason, Force: f.force, DryRun: f.dryRun})
		return replayed.Returned, err
	}, inInbox)
}

func parseDeadFilter(c *commandContext, verb string, args []string) (deadFilter, error) {
	var f deadFilter
	changes := verb == "retry" || verb == "remove"
	if !changes && verb != "list" && verb != "groups" && verb != "show" {
		return f, usagef("dead: %.40q is not list, groups, show, retry, remove or audit", verb)
	}
	flags := newFlagSet("dead " + verb)
	if verb == "groups" {
		f.from = "inbox"
	} else {
		flags.StringVar(&f.from, "from", "all", "outbox, inbox or all")
		flags.StringVar(&f.group, "group", "", "only failures of this `kind`, as dead groups prints it; in the inbox")
	}
	flags.StringVar(&f.name, "name", "", "only messages of this `name`")
	flags.StringVar(&f.class, "class", "", "only failures of this `class`")
	flags.IntVar(&f.limit, "limit", 0, "at most so many of each (0: 100, but all for retry and remove)")
	addID := func(text string) error {
		id, err := uuid.Parse(text)
		f.ids = append(f.ids, id)
		return err
	}
	flags.Func("id", "only the message of this `id`, also without the flag's name; may be repeated", addID)
	if verb == "retry" {
		flags.BoolVar(&f.force, "force", false, "also those that are older than the consumers' memory of what was processed")
		flags.BoolVar(&f.dryRun, "dry-run", false, "only tell how many there are")
	}
	if changes {
		flags.StringVar(&f.by, "by", osUser(), "`who` changes them; kept for dead audit")
		flags.StringVar(&f.reason, "reason", "", "`why`; kept, too")
		flags.BoolVar(&f.all, "all", false, "really all of them, where nothing else chooses")
	}
	err := parseArguments(c, flags, args, func(text string) error {
		if err := addID(text); err != nil {
			return usagef("dead %s: %.40q is not an id", verb, text)
		}
		return nil
	})
	if err != nil {
		return f, err
	}
	chosen := f.name != "" || f.group != "" || f.class != "" || len(f.ids) > 0 || f.limit > 0
	switch {
	case f.from != "all" && f.from != "outbox" && f.from != "inbox":
		return f, usagef("dead: --from must be outbox, inbox or all")
	case f.group != "" && f.from == "outbox":
		return f, usagef("dead: --group chooses in the inbox")
	case f.limit < 0:
		return f, usagef("dead: --limit must not be negative")
	case verb == "show" && len(f.ids) == 0:
		return f, usagef("dead show: say the id, as in dead show ID")
	case changes && !chosen && !f.all:
		return f, usagef("dead %s: choose by ID, --name, --class, --group or --limit, or say --all", verb)
	case changes && f.by == "":
		return f, usagef("dead %s: say --by", verb)
	}
	if f.group != "" {
		f.from = "inbox"
	}
	if !changes && f.limit == 0 {
		f.limit = 100
	}
	return f, nil
}

func newDeadStores(c *commandContext) deadStores {
	return deadStores{c.parts.messages.DeadLetters(), c.parts.broker.consumer.DeadLetters(), c.parts.servers.workers}
}

// recorded lets who changes dead letters of the inbox be found by dead audit.
func (s deadStores) recorded(f deadFilter, action string, change func(context.Context, inbox.Filter) (int, error)) func(context.Context, inbox.Filter) (int, error) {
	return func(ctx context.Context, filter inbox.Filter) (int, error) {
		entry := postgres.DeadChange{Action: action, By: f.by, Reason: f.reason, Chosen: f.chosen()}
		return postgres.RecordDeadChange(ctx, s.pool, entry, func() (int, error) { return change(ctx, filter) })
	}
}

func (f deadFilter) outbox() outbox.Filter {
	return outbox.Filter{IDs: f.ids, Name: f.name, Class: f.class, Limit: f.limit}
}

func (f deadFilter) inbox() inbox.Filter {
	return inbox.Filter{IDs: f.ids, Name: f.name, Class: f.class, Fingerprint: f.group, Limit: f.limit}
}

func (f deadFilter) chosen() string {
	text := chosenBy(f.outbox())
	if f.group != "" {
		text += fmt.Sprintf(" group=%q", f.group)
	}
	return text
}

// list prints one line per dead letter; whole adds headers and body.
func (s deadStores) list(ctx context.Context, w io.Writer, f deadFilter, whole bool) error {
	found := 0
	if f.from != "inbox" {
		letters, err := s.outbox.List(ctx, f.outbox())
		if err != nil {
			return err
		}
		for _, d := range letters {
			printDead(w, "outbox", d.ID, d.Name, d.Class, d.Attempts, d.FailedAt, d.Error)
			if whole {
				printContent(w, d.Headers, d.Body)
			}
		}
		found += len(letters)
	}
	if f.from != "outbox" {
		letters, err := s.inbox.List(ctx, f.inbox())
		if err != nil {
			return err
		}
		for _, d := range letters {
			printDead(w, "inbox", d.Message.ID, d.Message.Name, d.Class, d.Attempts, d.FailedAt, d.Error)
			if whole {
				printOrigin(w, d)
				printContent(w, d.Message.Headers, d.Message.Body)
			}
		}
		found += len(letters)
	}
	if whole && found == 0 {
		return errors.New("dead show: no such dead letter")
	}
	return nil
}

func printDead(w io.Writer, from string, id uuid.UUID, name, class string, attempts int, at time.Time, text string) {
	fmt.Fprintf(w, "%s\t%s\t%s\t%s\tattempts=%d\t%s\t%#q\n", from, id, name, class, attempts, at.UTC().Format(time.RFC3339), text)
}

func printContent(w io.Writer, headers map[string]string, body []byte) {
	fmt.Fprintf(w, "\theaders: %q\n\tbody: %#q\n", headers, body)
}

// change retries or removes what the filter chooses, in both places or one; the outbox first, which refuses a bad name or
// reason before anything is changed.
func (s deadStores) change(ctx context.Context, w io.Writer, f deadFilter, done string,
	inOutbox func(context.Context, outbox.Filter) (int, error), inInbox func(context.Context, inbox.Filter) (int, error),
) error {
	var err error
	var n, m int
	if f.from != "inbox" {
		n, err = inOutbox(ctx, f.outbox())
	}
	if err == nil && f.from != "outbox" {
		m, err = inInbox(ctx, f.inbox())
	}
	fmt.Fprintf(w, "%s: outbox %d, inbox %d\n", done, n, m)
	return err
}
