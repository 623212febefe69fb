package operator

import (
	"errors"
	"fmt"

	"github.com/spf13/cobra"
)

// pause keeps relays and consumers from beginning anything.
func (o *Operator) pause() *cobra.Command {
	return o.turning(pausing, "Have all relays of an outbox, or all processes of a consumer, begin nothing more",
		"What they have begun ends. Writers go on, and what they write waits. The pause outlives the processes, until resume.")
}

func (o *Operator) resume() *cobra.Command {
	return o.turning(resuming, "End the pause of an outbox or a consumer", "The processes begin again within a few seconds.")
}

// turned is one part that was paused or resumed.
type turned struct {
	Part   string `json:"part"`
	Paused bool   `json:"paused"`
	DryRun bool   `json:"dry_run,omitempty"`
}

func (o *Operator) turning(what, short, more string) *cobra.Command {
	cmd := &cobra.Command{Use: what + " NAME...", Short: short, Long: short + ".\n\n" + more}
	flags := addChangeFlags(cmd)
	cmd.ValidArgsFunction = among(mapped(o.pausables(), func(p pausable) string { return p.name }))
	cmd.RunE = func(cmd *cobra.Command, names []string) error {
		c, err := flags.change()
		if err != nil {
			return err
		}
		if len(names) == 0 {
			return usagef("%s: say which outbox or consumer", what)
		}
		parts := make([]pausable, len(names))
		for i, name := range names {
			if parts[i], err = o.pausableNamed(name); err != nil {
				return usagef("%s: %w", what, err)
			}
		}
		var failed []error
		done := []turned{} // not null in JSON
		for _, p := range parts {
			if err := o.turn(cmd.Context(), what, p, c); err != nil {
				failed = append(failed, fmt.Errorf("%s: %w", p.name, err))
				continue
			}
			done = append(done, turned{p.name, what == pausing, c.DryRun})
		}
		return errors.Join(append(failed, printTurned(cmd, done))...)
	}
	return cmd
}

func printTurned(cmd *cobra.Command, done []turned) error {
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
