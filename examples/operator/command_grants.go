package operator

import (
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"
)

// granter is a part that tells what a role of the database needs for a job.
type granter interface {
	Grants(job string) []string
}

// roleJobs are those of the packages.
var roleJobs = []string{"write", "relay", "consume", "idempotency", "sweep", "operate"}

// schemaGrants prints what a role of the database needs.
func (o *Operator) schemaGrants() *cobra.Command {
	cmd := &cobra.Command{
		Use: "grants", Short: "Print what a role of the database needs for its jobs, and no more", Args: noArguments,
		Long: "Print what a role of the database needs for its jobs, and no more, as SQL for whoever owns the tables. What the handlers,\n" +
			"sweeps and transactions of the service itself read and write is not in it. Jobs are " + strings.Join(roleJobs, ", ") + ".",
	}
	chosen := cmd.Flags().StringSlice("job", nil, "for this `job`, or several")
	to := cmd.Flags().String("to", "", "the `role`, which must exist")
	complete(cmd, "job", several(roleJobs))
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		switch {
		case len(*chosen) == 0:
			return usagef("schema grants: say --job: %s", strings.Join(roleJobs, ", "))
		case *to == "" || len(*to) > 63 || plain(*to) != *to:
			return usagef("schema grants: say --to: the name of a role, of at most 63 bytes")
		}
		statements, err := o.grants(*chosen, *to)
		if err != nil {
			return err
		}
		if wantsJSON(cmd) {
			return printJSON(cmd, statements)
		}
		for _, s := range statements {
			fmt.Fprintln(cmd.OutOrStdout(), s)
		}
		return nil
	}
	return cmd
}

// grants are the statements for the jobs, each once. A job that no part has is a mistake.
func (o *Operator) grants(chosen []string, to string) ([]string, error) {
	statements := []string{} // not null in JSON
	for _, job := range chosen {
		if !slices.Contains(roleJobs, job) {
			return nil, usagef("schema grants: --job: %.40q is none of %s", job, strings.Join(roleJobs, ", "))
		}
		found := false
		for _, p := range o.cfg.parts() {
			part, ok := p.Part.(granter)
			if !ok {
				continue
			}
			for _, privileges := range part.Grants(job) {
				found = true
				s := "GRANT " + privileges + " TO " + pgx.Identifier{to}.Sanitize() + ";"
				if !slices.Contains(statements, s) {
					statements = append(statements, s)
				}
			}
		}
		if !found {
			return nil, usagef("schema grants: no part here does the job %s on Postgres", job)
		}
	}
	return statements, nil
}
