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
)

// expiry shows what falls due.
func (o *commands) expiry() *cobra.Command {
	return parent("expiry", "Rows that fall due", &cobra.Command{
		Use: "due", Short: "Show how much is overdue and what falls due next", Args: noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error { return printDue(cmd, o.Config.Sweeps) },
	}, o.stuck())
}

func printDue(cmd *cobra.Command, sweeps []operator.Sweep) error {
	alone := core.Operator{Config: operator.Config{Sweeps: sweeps}}
	s := alone.Look(cmd.Context())
	var err error
	if failed := s.Failures(); len(failed) > 0 {
		err = errors.New(strings.Join(failed, "; "))
	}
	if wantsJSON(cmd) {
		return errors.Join(printJSON(cmd, s.Sweeps), err)
	}
	return errors.Join(sweepTable(cmd.OutOrStdout(), s.Sweeps).flush(), err)
}

// stuckAfter is for how long a row is overdue at least that counts as stuck: a sweeper looks every 90 s, even if
// nothing wakes it.
const stuckAfter = 2 * time.Minute

// overdue is a store that lists what is overdue.
type overdue interface {
	Overdue(ctx context.Context, by time.Duration, limit int) ([]expiry.Row, error)
}

// stuckRow is a row that should have been expired.
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
		Long: "List rows that are long overdue: they fail by themselves, a transaction holds them, or nobody sweeps. It exits with 1 when there are any.",
	}
	after := seconds(stuckAfter)
	cmd.Flags().Var(&after, "after", "overdue for at least so much `time`")
	limit := cmd.Flags().Int("limit", core.Listed, "at most so many of each sweep")
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
			failed = append(failed, fmt.Errorf("%s: the store does not tell", w.Name))
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
	if wantsJSON(cmd) {
		return printJSON(cmd, rows)
	}
	t := newTable(cmd.OutOrStdout(), "SWEEP", "ID", "DEADLINE")
	for _, r := range rows {
		t.row(r.Sweep, r.ID, core.Moment(r.Deadline))
	}
	return t.flush()
}
