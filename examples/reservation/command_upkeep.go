package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/holdfast-go/holdfast/expiry"
	"github.com/holdfast-go/holdfast/idempotency/idempotencypgx"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
	"github.com/holdfast-go/holdfast/outbox"
)

// runRelay is the relay for cron. It exits with 0 when all went, 1 when a message failed, 2 when it could not run.
func runRelay(ctx context.Context, c *commandContext, args []string) (int, error) {
	flags := newFlagSet("relay")
	limit := flags.Int("limit", 1000, "end after so many messages")
	timeLimit := flags.Duration("time-limit", 0, "wait for new messages until so much `time` has passed (0: end when the outbox is empty)")
	if err := parseFlags(c, flags, args); err != nil {
		return exitUsage, err
	}
	if *limit < 1 || *timeLimit < 0 {
		return exitUsage, usagef("relay: --limit must be at least 1 and --time-limit not negative")
	}
	var report outbox.Report
	err := whilePublishing(ctx, c.parts.publisher.Run, func(ctx context.Context) (err error) {
		report, err = c.parts.relay.Drain(ctx, outbox.Bounds{Limit: *limit, TimeLimit: *timeLimit})
		return err
	})
	fmt.Fprintf(c.stdout, "published %d, failed %d, dead %d\n", report.Published, report.Failed, report.Dead)
	if err != nil {
		return exitUsage, err
	}
	return report.ExitCode(), nil
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
	pool := c.parts.servers.workers
	sent, err1 := c.parts.source.Prune(ctx)
	received, err2 := inboxpgx.Prune(ctx, pool, inboxpgx.PruneConfig{})
	records, err3 := idempotencypgx.Prune(ctx, pool, idempotencypgx.SchemaConfig{})
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
	if err := c.parts.prepare(ctx, c.log); err != nil {
		return exitFailed, err
	}
	fmt.Fprintln(c.stdout, "tables, exchange and queues are up to date")
	return exitOK, nil
}

const doctorTimeout = 30 * time.Second

// runDoctor prints what the packages find amiss; it changes nothing.
func runDoctor(ctx context.Context, c *commandContext, args []string) (int, error) {
	if err := parseFlags(c, newFlagSet("doctor"), args); err != nil {
		return exitUsage, err
	}
	ctx, cancel := context.WithTimeout(ctx, doctorTimeout)
	defer cancel()
	var errs []error
	found := 0
	for _, check := range c.parts.doctorChecks() {
		findings, err := check(ctx)
		errs = append(errs, err)
		found += len(findings)
		for _, f := range findings {
			fmt.Fprintf(c.stdout, "%s: %s\n\tmend: %s\n", f.Component, f.Problem, f.Mend)
		}
	}
	if err := errors.Join(errs...); err != nil {
		return exitFailed, err
	}
	if found > 0 {
		fmt.Fprintf(c.stdout, "findings: %d; the command migrate creates what does not exist\n", found)
		return exitFailed, nil
	}
	fmt.Fprintln(c.stdout, "all is well")
	return exitOK, nil
}

func (p *parts) doctorChecks() []func(context.Context) ([]expiry.Finding, error) {
	return []func(context.Context) ([]expiry.Finding, error){
		p.transactor.Check,
		p.source.Check,
		p.listener.Check,
		func(ctx context.Context) ([]expiry.Finding, error) {
			return inboxpgx.Check(ctx, p.servers.workers, inboxpgx.PruneConfig{})
		},
		p.records.Check,
		p.holds.Check,
		p.keys.Check,
		p.limiter.Check,
		p.publisher.Check,
		p.consumer.Check,
	}
}
