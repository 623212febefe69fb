package operator

import (
	"errors"
	"strings"

	"github.com/spf13/cobra"
)

// expiry shows what falls due.
func (o *Operator) expiry() *cobra.Command {
	return parent("expiry", "Rows that fall due", &cobra.Command{
		Use: "due", Short: "Show how much is overdue and what falls due next", Args: noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error { return printDue(cmd, o.cfg.Sweeps) },
	}, o.stuck())
}

func printDue(cmd *cobra.Command, sweeps []Sweep) error {
	alone := Operator{cfg: Config{Sweeps: sweeps}}
	s := alone.look(cmd.Context())
	var err error
	if failed := s.failed(); len(failed) > 0 {
		err = errors.New(strings.Join(failed, "; "))
	}
	if wantsJSON(cmd) {
		return errors.Join(printJSON(cmd, s.Sweeps), err)
	}
	return errors.Join(sweepTable(cmd.OutOrStdout(), s.Sweeps).flush(), err)
}
