package main

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/holdfast-go/holdfast/outbox"
)

// runRelay is the relay for cron. It exits with 0 when all went, 1 when a message failed, 2 when it could not run.
func runRelay(ctx context.Context, c *commandContext, args []string) (int, error) {
	flags := newFlagSet("relay")
	limit := flags.Int("limit", 1000, "end after so many messages")
	var timeLimit time.Duration
	flags.Func("time-limit", "wait for new messages until so much `time` has passed, such as 55 or 55s (0: end when the outbox is empty)",
		func(text string) (err error) {
			timeLimit, err = parseSeconds(text)
			return err
		})
	if err := parseFlags(c, flags, args); err != nil {
		return exitUsage, err
	}
	if *limit < 1 || timeLimit < 0 {
		return exitUsage, usagef("relay: --limit must be at least 1 and --time-limit not negative")
	}
	report, err := c.parts.relay.Drain(ctx, outbox.Bounds{Limit: *limit, TimeLimit: timeLimit})
	fmt.Fprintf(c.stdout, "published %d, failed %d, dead %d\n", report.Published, report.Failed, report.Dead)
	if err != nil {
		return exitUsage, err
	}
	return report.ExitCode(), nil
}

// parseSeconds reads a duration; a number without a unit is in seconds.
func parseSeconds(text string) (time.Duration, error) {
	if seconds, err := strconv.ParseUint(text, 10, 31); err == nil {
		return time.Duration(seconds) * time.Second, nil
	}
	return time.ParseDuration(text)
}

func runSweep(ctx context.Context, c *commandContext, args []string) (int, error) {
	if err := parseFlags(c, newFlagSet("sweep"), args); err != nil {
		return exitUsage, err
	}
	report, err := c.parts.sweeper.Sweep(ctx)
	fmt.Fprintf(c.stdout, "expired %d, poisoned %d\n", report.Expired, report.Poisoned)
	if err != nil || report.Poisoned > 0 {
		return exitFailed, err
	}
	return exitOK, nil
}

func runPrune(ctx context.Context, c *commandContext, args []string) (int, error) {
	if err := parseFlags(c, newFlagSet("prune"), args); err != nil {
		return exitUsage, err
	}
	sent, err1 := c.parts.messages.Prune(ctx)
	received, err2 := c.parts.inbox.Prune(ctx)
	records, err3 := c.parts.once.Prune(ctx)
	fmt.Fprintf(c.stdout, "outbox %d, inbox %d, idempotency %d\n", sent, received, records)
	if err := errors.Join(err1, err2, err3); err != nil {
		return exitFailed, err
	}
	return exitOK, nil
}

func runMigrate(ctx context.Context, c *commandContext, args []string) (int, error) {
	if err := parseFlags(c, newFlagSet("migrate"), args); err != nil {
		return exitUsage, err
	}
	if err := c.parts.prepare(ctx); err != nil {
		return exitFailed, err
	}
	fmt.Fprintln(c.stdout, "tables and broker are up to date")
	return exitOK, nil
}
