package command

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/holdfast-go/holdfast/expiry"
	"github.com/holdfast-go/holdfast/modules/operator"
	"github.com/holdfast-go/holdfast/modules/operator/internal/core"
	"github.com/holdfast-go/holdfast/outbox"
)

// relay publishes the messages in an outbox and ends: a relay for cron.
func (o *commands) relay() *cobra.Command {
	cmd := &cobra.Command{
		Use: "relay", Short: "Publish the messages in the outbox, and end", Args: noArguments,
		Long: "Publish the messages in the outbox, and end. It exits with 0 if all were published, 1 if a message failed, and 2 if it could not run.",
	}
	limit := cmd.Flags().Int("limit", 1000, "end after this many messages")
	var timeLimit seconds
	cmd.Flags().Var(&timeLimit, "time-limit", "wait for new messages for this `time`, such as 55 or 55s (0: end when the outbox is empty)")
	var memory size
	cmd.Flags().Var(&memory, "memory-limit", "end when the process uses more `bytes`, such as 256M (0: never)")
	from := cmd.Flags().String("from", "", "the `outbox`, if there are several")
	var relayed []string
	for _, b := range o.Config.Outboxes {
		if b.Relay != nil {
			relayed = append(relayed, b.Name)
		}
	}
	complete(cmd, "from", among(relayed))
	dry := cmd.Flags().Bool("dry-run", false, "only count the messages that are ready, up to 100,000")
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

// printReady prints the number of messages that a relay would publish now.
func printReady(cmd *cobra.Command, b operator.Outbox) error {
	s := core.ReadOutbox(cmd.Context(), b)
	switch {
	case s.Error != "":
		return &exitError{exitUsage, errors.New(s.Name + ": " + s.Error)}
	case wantsJSON(cmd):
		return printJSON(cmd, map[string]any{"ready": s.Ready, "dry_run": true})
	}
	fmt.Fprintf(cmd.OutOrStdout(), "%s: %d ready to be published\n", s.Name, s.Ready)
	return nil
}

// relayed returns the outbox of that name, or the only one, that has a relay.
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
		return operator.Outbox{}, core.Mistakef("relay: there are several outboxes: set --from")
	}
	return found[0], nil
}

// sweep expires overdue rows, once.
func (o *commands) sweep() *cobra.Command {
	cmd := &cobra.Command{
		Use: "sweep", Short: "Expire overdue rows, once", Args: noArguments,
		Long: "Expire overdue rows, once. It exits with 1 if rows are poisoned: they fail by themselves.",
	}
	from := cmd.Flags().String("from", "", "the `sweep`, if there are several (default: all)")
	var swept []string
	for _, w := range o.Config.Sweeps {
		if w.Sweeper != nil {
			swept = append(swept, w.Name)
		}
	}
	complete(cmd, "from", among(swept))
	flags := addNotedFlags(cmd, "only count the overdue rows")
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

// sweepOne runs one sweep, and logs it.
func (o *commands) sweepOne(cmd *cobra.Command, w operator.Sweep, c core.Change) (r expiry.Report, err error) {
	err = o.upkeepNoted(cmd, operator.Action{What: "sweep", On: w.Name, By: c.By, Reason: c.Reason}, func() (_ int, err error) {
		r, err = w.Sweeper.Sweep(cmd.Context())
		return r.Expired, err
	})
	return r, err
}

// expiry shows rows that fall due.
func (o *commands) expiry() *cobra.Command {
	return parent("expiry", "Rows that fall due", &cobra.Command{
		Use: "due", Short: "Show how many rows are overdue, and when the next one falls due", Args: noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error { return printDue(cmd, o.Config.Sweeps) },
	}, o.stuck())
}

func printDue(cmd *cobra.Command, sweeps []operator.Sweep) error {
	alone := core.Operator{Config: operator.Config{Sweeps: sweeps}}
	s := alone.ReadStatus(cmd.Context())
	var err error
	if failed := s.Failures(); len(failed) > 0 {
		err = errors.New(strings.Join(failed, "; "))
	}
	if wantsJSON(cmd) {
		return errors.Join(printJSON(cmd, s.Sweeps), err)
	}
	return errors.Join(sweepTable(cmd.OutOrStdout(), s.Sweeps).flush(), err)
}

// stuckAfter is how long a row must be overdue to count as stuck. A sweeper queries every 90 s, even without a
// wake-up.
const stuckAfter = 2 * time.Minute

// overdue is a store that lists overdue rows.
type overdue interface {
	Overdue(ctx context.Context, by time.Duration, limit int) ([]expiry.Row, error)
}

// stuckRow is a row that should have expired.
type stuckRow struct {
	Sweep    string            `json:"sweep"`
	ID       string            `json:"id"`
	Deadline time.Time         `json:"deadline,omitzero"`
	Values   map[string]string `json:"values,omitempty"`
}

// stuck lists rows that no sweeper has expired.
func (o *commands) stuck() *cobra.Command {
	cmd := &cobra.Command{
		Use: "stuck", Short: "List rows that are long overdue", Args: noArguments,
		Long: "List rows that are long overdue: they fail by themselves, a transaction holds them, or nobody sweeps. It exits with 1 if there are any.",
	}
	after := seconds(stuckAfter)
	cmd.Flags().Var(&after, "after", "overdue for at least this `time`")
	limit := cmd.Flags().Int("limit", core.Listed, "at most this many from each sweep")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if *limit < 1 {
			return core.Mistakef("expiry stuck: --limit must be at least 1")
		}
		rows, err := o.stuckRows(cmd.Context(), time.Duration(after), *limit)
		if err := errors.Join(err, printStuck(cmd, rows)); err != nil {
			return err
		}
		if len(rows) > 0 {
			return &exitError{code: exitFailed}
		}
		return nil
	}
	return cmd
}

func (o *commands) stuckRows(ctx context.Context, after time.Duration, limit int) ([]stuckRow, error) {
	all := []stuckRow{} // not null in JSON
	var failed []error
	for _, w := range o.Config.Sweeps {
		store, ok := w.Store.(overdue)
		if !ok {
			failed = append(failed, fmt.Errorf("%s: the store does not list overdue rows", w.Name))
			continue
		}
		rows, err := store.Overdue(ctx, after, limit)
		if err != nil {
			failed = append(failed, fmt.Errorf("%s: %w", w.Name, err))
		}
		for _, r := range rows {
			all = append(all, stuckRow{w.Name, r.ID, r.Deadline, r.Values})
		}
	}
	return all, errors.Join(failed...)
}

func printStuck(cmd *cobra.Command, rows []stuckRow) error {
	return printRows(cmd, rows, func(t *table, r stuckRow) {
		t.row(r.Sweep, r.ID, core.Moment(r.Deadline))
	}, "SWEEP", "ID", "DEADLINE")
}

// pruner is a part whose records have a retention.
type pruner interface {
	Prune(ctx context.Context) (int, error)
}

// prunable is a pruner that can count the records it would delete.
type prunable interface {
	Prunable(ctx context.Context) (int, error)
}

// pruned is the number of records of a part that were deleted, or would be.
type pruned struct {
	Name string `json:"name"`
	// Count is null if the part does not count.
	Count  *int `json:"count"`
	DryRun bool `json:"dry_run,omitempty"`
}

// prune deletes records that are older than their retention.
func (o *commands) prune() *cobra.Command {
	cmd := &cobra.Command{
		Use: "prune", Short: "Delete records that are older than their retention", Args: noArguments,
		Long: "Delete records that are older than their retention, as running services do by themselves.",
	}
	flags := addNotedFlags(cmd, "only count them, up to 100,000 of each kind")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		c, err := flags.change()
		if err != nil {
			return err
		}
		all := []pruned{} // not null in JSON
		var failed []error
		for _, part := range o.Parts() {
			p, ok := part.Part.(pruner)
			if !ok {
				continue
			}
			done := atWork(cmd, part.Name)
			one, err := o.pruneOne(cmd, part.Name, p, c)
			done()
			if err != nil {
				failed = append(failed, fmt.Errorf("%s: %w", part.Name, err))
			}
			all = append(all, one)
		}
		return errors.Join(printPruned(cmd, all, c.DryRun), errors.Join(failed...))
	}
	return cmd
}

func (o *commands) pruneOne(cmd *cobra.Command, name string, p pruner, c core.Change) (pruned, error) {
	if c.DryRun {
		store, ok := p.(prunable)
		if !ok {
			return pruned{Name: name, DryRun: true}, nil
		}
		n, err := store.Prunable(cmd.Context())
		return pruned{name, &n, true}, err
	}
	n := 0
	err := o.upkeepNoted(cmd, operator.Action{What: "prune", On: name, By: c.By, Reason: c.Reason}, func() (_ int, err error) {
		n, err = p.Prune(cmd.Context())
		return n, err
	})
	return pruned{name, &n, false}, err
}

func printPruned(cmd *cobra.Command, all []pruned, dry bool) error {
	if wantsJSON(cmd) {
		return printJSON(cmd, all)
	}
	head := "DELETED"
	if dry {
		head = "WOULD BE DELETED"
	}
	t := newTable(cmd.OutOrStdout(), "PART", head)
	for _, p := range all {
		if p.Count == nil {
			t.row(p.Name, "unknown")
			continue
		}
		t.row(p.Name, *p.Count)
	}
	return t.flush()
}

// setup creates or updates tables, queues and streams.
func (o *commands) setup() *cobra.Command {
	cmd := &cobra.Command{
		Use: "setup", Short: "Create missing tables, queues and streams", Args: noArguments,
		Long: "Create missing tables, queues and streams. Existing ones are left as they are, so it may run before every start.",
	}
	flags := addNotedFlags(cmd, "only list the parts that would be set up")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		c, err := flags.change()
		if err != nil {
			return err
		}
		done, err := o.setUp(cmd, c)
		if err != nil {
			return err
		}
		if wantsJSON(cmd) {
			return printJSON(cmd, done)
		}
		for _, name := range done {
			if c.DryRun {
				name += " would be set up"
			}
			fmt.Fprintln(cmd.OutOrStdout(), name)
		}
		return nil
	}
	return cmd
}

// setUp runs the steps, after it has created the log's own table. It is logged only with --by or --reason: as a command that
// runs before every start it mostly finds nothing to do.
func (o *commands) setUp(cmd *cobra.Command, c core.Change) (done []string, err error) {
	ctx := cmd.Context()
	steps := o.steps()
	names := core.Mapped(steps, func(s step) string { return s.name })
	if c.DryRun {
		return names, nil
	}
	if log, ok := o.Config.Log.(migrator); ok {
		if err := log.Migrate(ctx); err != nil {
			return nil, fmt.Errorf("log: %w", err)
		}
	}
	a := operator.Action{What: "setup", On: "all parts", Chosen: strings.Join(names, ", "), By: c.By, Reason: c.Reason}
	do := func() (int, error) {
		for i, step := range steps {
			if err := step.do(ctx); err != nil {
				return i, fmt.Errorf("%s: %w", step.name, err)
			}
		}
		return len(steps), nil
	}
	if !attended(cmd) {
		_, err = do()
		return names, err
	}
	return names, o.Noted(ctx, a, do)
}

// migrator is a part that creates its own tables.
type migrator interface {
	Migrate(ctx context.Context) error
}

type step struct {
	name string
	do   func(context.Context) error
}

// steps returns the steps of setup: all tables, then the queues and streams of brokers.
func (o *commands) steps() []step {
	var tables, brokers []step
	for _, p := range o.Parts() {
		if m, ok := p.Part.(migrator); ok {
			tables = append(tables, step{p.Name + ": tables", m.Migrate})
		}
		if b, ok := p.Part.(interface{ Setup(context.Context) error }); ok {
			brokers = append(brokers, step{p.Name + ": broker", b.Setup})
		}
	}
	return append(tables, brokers...)
}
