package operator

import (
	"errors"
	"io"
	"strings"

	"github.com/spf13/cobra"
)

// expiry shows what falls due.
func (o *Operator) expiry() *cobra.Command {
	return parent("expiry", "Rows that fall due", &cobra.Command{
		Use: "due", Short: "Show how much is overdue and what falls due next", Args: noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error { return o.expiryDue(cmd) },
	})
}

func (o *Operator) expiryDue(cmd *cobra.Command) error {
	sweepsAlone := Operator{Config{Sweeps: o.cfg.Sweeps}}
	s := sweepsAlone.look(cmd.Context())
	var err error
	if failed := s.failed(); len(failed) > 0 {
		err = errors.New(strings.Join(failed, "; "))
	}
	if wantsJSON(cmd) {
		return errors.Join(printJSON(cmd, s.Sweeps), err)
	}
	return errors.Join(printSweeps(cmd.OutOrStdout(), "SWEEP", s.Sweeps), err)
}

func printSweeps(w io.Writer, head string, sweeps []sweepStatus) error {
	t := newTable(w, head, "OVERDUE", "LAG", "NEXT", "UNDATED")
	for _, e := range sweeps {
		if e.Error != "" {
			t.row(e.Name, "?", "?", "?", "?")
			continue
		}
		next := "-"
		if e.Next != nil {
			next = "in " + age(*e.Next)
		}
		t.row(e.Name, e.Overdue, age(e.Lag), next, e.Undated)
	}
	return t.flush()
}
