package command

import (
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/spf13/cobra"

	"github.com/holdfast-go/holdfast/modules/operator"
	"github.com/holdfast-go/holdfast/modules/operator/internal/core"
)

// retry sends dead letters again.
func (o *commands) retry() *cobra.Command {
	cmd := &cobra.Command{
		Use: "retry [ID...]", Short: "Send dead letters again",
		Long: "Send dead letters again: those of an outbox to be published, those of a consumer to be processed, with their\n" +
			"attempts forgotten. Mend first what made them fail. --body and --patch replace their bodies on the way; their ids stay,\n" +
			"so that what was processed after all is not processed again.",
	}
	chosen, changed, all := o.addSelectFlags(cmd, ""), addChangeFlags(cmd), addAll(cmd)
	cmd.ValidArgsFunction = o.completing("", messageID)
	cmd.Flags().Float64Var(&changed.c.PerSecond, "rate", 0, "at most so many a second (0: as fast as it goes)")
	cmd.Flags().BoolVar(&changed.c.Force, "force", false, "also those that are older than the consumers' memory of what was processed: they may take effect twice")
	edited := addEditFlags(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		e, err := edited.edit(cmd, args)
		if err != nil {
			return err
		}
		changed.c.Edit = e.Function(nil)
		return o.change(cmd, "retry", chosen, changed, *all, args)
	}
	return cmd
}

// drop removes dead letters.
func (o *commands) drop() *cobra.Command {
	cmd := &cobra.Command{Use: "drop [ID...]", Short: "Remove dead letters for ever"}
	chosen, changed, all := o.addSelectFlags(cmd, ""), addChangeFlags(cmd), addAll(cmd)
	cmd.ValidArgsFunction = o.completing("", messageID)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		return o.change(cmd, "drop", chosen, changed, *all, args)
	}
	return cmd
}

func addAll(cmd *cobra.Command) *bool {
	return cmd.Flags().Bool("all", false, "really all of them, where nothing else chooses")
}

func (o *commands) change(cmd *cobra.Command, what string, chosen *core.Typed, flags *changeFlags, all bool, ids []string) error {
	chosen.IDs = ids
	places, f, err := o.Choose(*chosen, "")
	if err != nil {
		return err
	}
	c, err := flags.change()
	if err != nil {
		return err
	}
	if !core.Chooses(f) && !all {
		return core.Mistakef("%s: choose by id, --name, --key, --class, --group, --error, --since, --until or --limit, or say --all", what)
	}
	done, failed := o.ApplyTo(cmd.Context(), what, places, f, c, func(p core.Place, c core.Change) (core.Change, func()) {
		return o.withProgress(cmd, what, p, f, c)
	})
	return errors.Join(printChanged(cmd, what, done), failed, allFound(f, done, failed))
}

// allFound returns an error where fewer dead letters were found than were asked for by id. A failure may be why.
func allFound(f core.Filter, done []core.Changed, failed error) error {
	found := 0
	for _, c := range done {
		found += c.Count + c.Outlived + c.Failed
	}
	asked := len(f.IDs)
	switch {
	case failed != nil || found >= asked:
		return nil
	case asked == 1:
		return fmt.Errorf("there is no such dead letter: %s", f.IDs[0])
	}
	return fmt.Errorf("%d of the %d ids are no such dead letters", asked-found, asked)
}

// upkeepNoted is noted for what a service does by itself, too. Without --by and --reason it is such upkeep, of cron for example:
// it is noted once it has changed something, so that what people did stays in sight. A role of the database that may do
// that and has no right to the log does it all the same, and so it is done where there is no log yet.
func (o *commands) upkeepNoted(cmd *cobra.Command, a operator.Action, do func() (int, error)) error {
	if !attended(cmd) {
		n, err := do()
		if n == 0 {
			return err
		}
		do = func() (int, error) { return n, err }
	}
	begun := false
	err := o.Noted(cmd.Context(), a, func() (int, error) {
		begun = true
		return do()
	})
	if begun || err == nil {
		return err
	}
	answer, ok := errors.AsType[*pgconn.PgError](err)
	if ok && (answer.Code == missingTable || answer.Code == insufficientPrivilege) {
		fmt.Fprintf(cmd.ErrOrStderr(), "%s: not noted: %s\n", a.What, core.Plain(core.OneLine(err)))
		err = nil
	} else if attended(cmd) {
		return err
	}
	_, failed := do()
	return errors.Join(failed, err)
}

// attended says that somebody has typed who does something, or why.
func attended(cmd *cobra.Command) bool {
	return cmd.Flags().Changed("by") || cmd.Flags().Changed("reason")
}

// insufficientPrivilege is the SQLSTATE of what a role may not do.
const insufficientPrivilege = "42501"

func printChanged(cmd *cobra.Command, what string, done []core.Changed) error {
	if wantsJSON(cmd) {
		return printJSON(cmd, done)
	}
	verb := map[string]string{"retry": "retried", "drop": "dropped"}[what]
	for _, c := range done {
		v := verb
		if c.DryRun {
			v = "would be " + verb
		}
		fmt.Fprintf(cmd.OutOrStdout(), "%s: %d %s", c.From, c.Count, v)
		if c.Outlived > 0 {
			fmt.Fprintf(cmd.OutOrStdout(), ", %d too old (--force)", c.Outlived)
		}
		if c.Failed > 0 {
			fmt.Fprintf(cmd.OutOrStdout(), ", %d could not be", c.Failed)
		}
		fmt.Fprintln(cmd.OutOrStdout())
	}
	return nil
}
