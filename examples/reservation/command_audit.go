package main

import (
	"context"
	"fmt"
	"os/user"
	"time"

	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
)

// osUser is who runs the program, "" if that is not known.
func osUser() string {
	u, err := user.Current()
	if err != nil {
		return ""
	}
	return u.Username
}

// runDeadAudit lists who retried or removed dead letters of the outbox.
func runDeadAudit(ctx context.Context, c *commandContext, args []string) (int, error) {
	flags := newFlagSet("dead audit")
	limit := flags.Int("limit", 100, "the newest so many")
	if err := parseFlags(c, flags, args); err != nil {
		return exitUsage, err
	}
	if *limit < 1 {
		return exitUsage, usagef("dead audit: --limit must be at least 1")
	}
	letters, err := outboxpgx.NewDeadLetters(c.parts.servers.workers, outboxpgx.SchemaConfig{})
	if err != nil {
		return exitFailed, err
	}
	entries, err := letters.Audit(ctx, *limit)
	if err != nil {
		return exitFailed, err
	}
	for _, e := range entries {
		fmt.Fprintf(c.stdout, "%s\t%s\t%d\tby=%q\treason=%q\t%s\n",
			e.At.UTC().Format(time.RFC3339), e.Action, e.Count, e.By, e.Reason, chosenBy(e.Filter))
	}
	return exitOK, nil
}

// chosenBy is a filter in the words of the flags that set it.
func chosenBy(f outboxpgx.Filter) string {
	return fmt.Sprintf("ids=%v name=%q class=%q limit=%d", f.IDs, f.Name, f.Class, f.Limit)
}
