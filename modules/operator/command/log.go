package command

import (
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/holdfast-go/holdfast/modules/operator"
	"github.com/holdfast-go/holdfast/modules/operator/internal/core"
)

// log lists what operators did.
func (o *commands) log() *cobra.Command {
	cmd := &cobra.Command{Use: "log", Short: "List what operators did, the newest first", Args: noArguments}
	var f operator.LogFilter
	cmd.Flags().IntVar(&f.Limit, "limit", core.Listed, "the newest so many")
	cmd.Flags().BoolVar(&f.WithoutUpkeep, "without-upkeep", false, "only what services do not do by themselves: no sweep, prune and setup")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if f.Limit < 1 {
			return core.Mistakef("log: --limit must be at least 1")
		}
		actions, failed := o.Actions(cmd.Context(), f)
		return errors.Join(printActions(cmd, actions), failed)
	}
	return cmd
}

func printActions(cmd *cobra.Command, actions []operator.Action) error {
	if wantsJSON(cmd) {
		return printJSON(cmd, actions)
	}
	t := newTable(cmd.OutOrStdout(), "AT", "WHAT", "ON", "COUNT", "BY", "REASON", "CHOSEN", "FAILURE")
	for _, a := range actions {
		count := "unknown"
		if a.Count != nil {
			count = fmt.Sprint(*a.Count)
		}
		t.row(core.Moment(a.At), a.What, a.On, count, a.By, a.Reason, core.Short(a.Chosen, 120), core.Short(a.Failure, 80))
	}
	return t.flush()
}

// pause keeps relays and consumers from beginning anything.
func (o *commands) pause() *cobra.Command {
	return o.turning(core.Pausing, "Have all relays of an outbox, or all processes of a consumer, begin nothing more",
		"What they have begun ends. Writers go on, and what they write waits. The pause outlives the processes, until resume.")
}

func (o *commands) resume() *cobra.Command {
	return o.turning(core.Resuming, "End the pause of an outbox or a consumer", "The processes begin again within a few seconds.")
}

func (o *commands) turning(what, short, more string) *cobra.Command {
	cmd := &cobra.Command{Use: what + " NAME...", Short: short, Long: short + ".\n\n" + more}
	flags := addChangeFlags(cmd)
	cmd.ValidArgsFunction = among(core.Mapped(o.Pausables(), func(p core.Pausable) string { return p.Name }))
	cmd.RunE = func(cmd *cobra.Command, names []string) error {
		c, err := flags.change()
		if err != nil {
			return err
		}
		if len(names) == 0 {
			return core.Mistakef("%s: say which outbox or consumer", what)
		}
		parts := make([]core.Pausable, len(names))
		for i, name := range names {
			if parts[i], err = o.PausableNamed(name); err != nil {
				return core.Mistakef("%s: %w", what, err)
			}
		}
		var failed []error
		done := []core.Turned{} // not null in JSON
		for _, p := range parts {
			if err := o.Turn(cmd.Context(), what, p, c); err != nil {
				failed = append(failed, fmt.Errorf("%s: %w", p.Name, err))
				continue
			}
			done = append(done, core.Turned{Part: p.Name, Paused: what == core.Pausing, DryRun: c.DryRun})
		}
		return errors.Join(append(failed, printTurned(cmd, done))...)
	}
	return cmd
}

func printTurned(cmd *cobra.Command, done []core.Turned) error {
	if wantsJSON(cmd) {
		return printJSON(cmd, done)
	}
	for _, p := range done {
		is := map[bool]string{false: "is", true: "would be"}[p.DryRun]
		state := map[bool]string{false: "resumed", true: "paused"}[p.Paused]
		fmt.Fprintf(cmd.OutOrStdout(), "%s %s %s\n", p.Part, is, state)
	}
	return nil
}
