package command

import (
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/holdfast-go/holdfast/expiry"
	"github.com/holdfast-go/holdfast/modules/operator"
	"github.com/holdfast-go/holdfast/modules/operator/internal/core"
	"github.com/holdfast-go/holdfast/outbox"
)

// relay publishes what is in the outboxes, and ends: a relay for cron.
func (o *commands) relay() *cobra.Command {
	cmd := &cobra.Command{
		Use: "relay", Short: "Publish what is in the outbox, and end", Args: noArguments,
		Long: "Publish what is in the outbox, and end. It exits with 0 when all went, 1 when a message failed, and 2 when it could not run.",
	}
	limit := cmd.Flags().Int("limit", 1000, "end after so many messages")
	var timeLimit seconds
	cmd.Flags().Var(&timeLimit, "time-limit", "wait for new messages until so much `time` has passed, such as 55 or 55s (0: end when the outbox is empty)")
	var memory size
	cmd.Flags().Var(&memory, "memory-limit", "end when the process holds more `bytes`, such as 256M (0: never)")
	from := cmd.Flags().String("from", "", "the `outbox`, where there are several")
	var relayed []string
	for _, b := range o.Config.Outboxes {
		if b.Relay != nil {
			relayed = append(relayed, b.Name)
		}
	}
	complete(cmd, "from", among(relayed))
	dry := cmd.Flags().Bool("dry-run", false, "only tell how many messages are ready; 100,000 are counted at most")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if *limit < 1 {
			return core.Mistakef("relay: --limit must be at least 1")
		}
		b, err := o.relayed(*from)
		if err != nil {
			return err
		}
		if *dry {
			return printReady(cmd, b)
		}
		report, err := b.Relay.Drain(cmd.Context(), outbox.Bounds{Limit: *limit, TimeLimit: time.Duration(timeLimit), MemoryLimit: uint64(memory)})
		if wantsJSON(cmd) {
			err = errors.Join(err, printJSON(cmd, map[string]int{"published": report.Published, "failed": report.Failed, "dead": report.Dead}))
		} else {
			fmt.Fprintf(cmd.OutOrStdout(), "published %d, failed %d, dead %d\n", report.Published, report.Failed, report.Dead)
		}
		if err != nil {
			return &exitError{exitUsage, err}
		}
		if code := report.ExitCode(); code != exitOK {
			return &exitError{code: code}
		}
		return nil
	}
	return cmd
}

// printReady tells what a relay would take now.
func printReady(cmd *cobra.Command, b operator.Outbox) error {
	s := core.LookAtOutbox(cmd.Context(), b)
	switch {
	case s.Error != "":
		return &exitError{exitUsage, errors.New(s.Name + ": " + s.Error)}
	case wantsJSON(cmd):
		return printJSON(cmd, map[string]any{"ready": s.Ready, "dry_run": true})
	}
	fmt.Fprintf(cmd.OutOrStdout(), "%s: %d ready to be published\n", s.Name, s.Ready)
	return nil
}

// relayed is the outbox of a name that has a relay.
func (o *commands) relayed(name string) (operator.Outbox, error) {
	var found []operator.Outbox
	for _, b := range o.Config.Outboxes {
		if b.Relay != nil && (name == "" || name == b.Name) {
			found = append(found, b)
		}
	}
	switch {
	case len(found) == 0 && name != "":
		return operator.Outbox{}, core.Mistakef("relay: --from: there is no relay for %.40q", name)
	case len(found) == 0:
		return operator.Outbox{}, core.Mistakef("relay: there is no relay")
	case len(found) > 1:
		return operator.Outbox{}, core.Mistakef("relay: there are several outboxes: say --from")
	}
	return found[0], nil
}

// sweep expires what is overdue, once.
func (o *commands) sweep() *cobra.Command {
	cmd := &cobra.Command{
		Use: "sweep", Short: "Expire what is overdue, once", Args: noArguments,
		Long: "Expire what is overdue, once. It exits with 1 when rows fail by themselves: they are poisoned.",
	}
	from := cmd.Flags().String("from", "", "the `sweep`, where there are several (default: all)")
	var swept []string
	for _, w := range o.Config.Sweeps {
		if w.Sweeper != nil {
			swept = append(swept, w.Name)
		}
	}
	complete(cmd, "from", among(swept))
	flags := addNotedFlags(cmd, "only tell how much is overdue")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		c, err := flags.change()
		if err != nil {
			return err
		}
		var chosen []operator.Sweep
		for _, w := range o.Config.Sweeps {
			if w.Sweeper != nil && (*from == "" || *from == w.Name) {
				chosen = append(chosen, w)
			}
		}
		if len(chosen) == 0 {
			return core.Mistakef("sweep: there is no sweeper %.40q", *from)
		}
		if c.DryRun {
			return printDue(cmd, chosen)
		}
		var total expiry.Report
		var failed []error
		for _, w := range chosen {
			r, err := o.sweepOne(cmd, w, c)
			total.Expired, total.Poisoned = total.Expired+r.Expired, total.Poisoned+r.Poisoned
			if err != nil {
				failed = append(failed, fmt.Errorf("%s: %w", w.Name, err))
			}
		}
		if wantsJSON(cmd) {
			failed = append(failed, printJSON(cmd, map[string]int{"expired": total.Expired, "poisoned": total.Poisoned}))
		} else {
			fmt.Fprintf(cmd.OutOrStdout(), "expired %d, poisoned %d\n", total.Expired, total.Poisoned)
		}
		if err := errors.Join(failed...); err != nil || total.Poisoned > 0 {
			return &exitError{exitFailed, err}
		}
		return nil
	}
	return cmd
}

// sweepOne expires what is overdue of one sweep, and has it noted.
func (o *commands) sweepOne(cmd *cobra.Command, w operator.Sweep, c core.Change) (r expiry.Report, err error) {
	err = o.upkeepNoted(cmd, operator.Action{What: "sweep", On: w.Name, By: c.By, Reason: c.Reason}, func() (_ int, err error) {
		r, err = w.Sweeper.Sweep(cmd.Context())
		return r.Expired, err
	})
	return r, err
}
