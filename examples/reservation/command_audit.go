package main

import (
	"context"
	"fmt"
	"io"
	"os/user"
	"strconv"
	"time"

	"github.com/holdfast-go/holdfast/examples/reservation/internal/postgres"
	"github.com/holdfast-go/holdfast/outbox"
)

// osUser is who runs the program, "" if that is not known.
func osUser() string {
	u, err := user.Current()
	if err != nil {
		return ""
	}
	return u.Username
}

// runDeadAudit lists who retried or removed dead letters, those of the outbox first.
func runDeadAudit(ctx context.Context, c *commandContext, args []string) (int, error) {
	flags := newFlagSet("dead audit")
	limit := flags.Int("limit", 100, "the newest so many of each")
	if err := parseFlags(c, flags, args); err != nil {
		return exitUsage, err
	}
	if *limit < 1 {
		return exitUsage, usagef("dead audit: --limit must be at least 1")
	}
	entries, err := c.parts.messages.Audit(ctx, *limit)
	if err != nil {
		return exitFailed, err
	}
	changes, err := postgres.DeadChanges(ctx, c.parts.servers.workers, *limit)
	if err != nil {
		return exitFailed, err
	}
	for _, e := range entries {
		printChange(c.stdout, "outbox", e.At, e.Action, strconv.Itoa(e.Count), e.By, e.Reason, chosenBy(e.Filter))
	}
	for _, d := range changes {
		count := "unknown"
		if d.Count != nil {
			count = strconv.Itoa(*d.Count)
		}
		printChange(c.stdout, "inbox", d.At, d.Action, count, d.By, d.Reason, d.Chosen)
	}
	return exitOK, nil
}

func printChange(w io.Writer, from string, at time.Time, action, count, by, reason, chosen string) {
	fmt.Fprintf(w, "%s\t%s\t%s\t%s\tby=%q\treason=%q\t%s\n", from, at.UTC().Format(time.RFC3339), action, count, by, reason, chosen)
}

// chosenBy is a filter in the words of the flags that set it.
func chosenBy(f outbox.Filter) string {
	return fmt.Sprintf("ids=%v name=%q class=%q limit=%d", f.IDs, f.Name, f.Class, f.Limit)
}
