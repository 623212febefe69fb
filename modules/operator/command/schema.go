package command

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/holdfast-go/holdfast/modules/operator/internal/core"
)

// schema prints the tables for a migration tool.
func (o *commands) schema() *cobra.Command {
	return parent("schema", "Tables for a migration tool, and privileges for roles", o.schemaPrint(), o.schemaGrants())
}

func (o *commands) schemaPrint() *cobra.Command {
	tools := slices.Sorted(maps.Keys(schemaTools))
	cmd := &cobra.Command{
		Use: "print", Short: "Print the tables as SQL, or write the files of a migration tool", Args: noArguments,
		Long: "Print the tables as SQL, or write the files of a migration tool.\n\n" +
			"Setup and a service's Migrate accept tables that the tool has created. Files that exist\n" +
			"are left as they are; one with another content is an error. For atlas run `atlas migrate hash` afterwards.\n\n" +
			"A new file gets the number after the highest one in the folder, so tools that only go forward apply it after\n" +
			"all others. The folder may hold your own migrations, too. Keep it in version control, and print again after an upgrade.",
	}
	tool := cmd.Flags().String("format", "sql", "sql, or files for `tool`: "+strings.Join(tools, ", "))
	dir := cmd.Flags().String("dir", "", "the `folder` of the tool's files")
	down := cmd.Flags().Bool("down", false, "print the SQL that removes the tables and all their rows")
	dry := cmd.Flags().Bool("dry-run", false, "only list the files that would be written")
	complete(cmd, "format", among(append(tools, "sql")))
	_ = cmd.MarkFlagDirname("dir") // it is there
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		files := schemaTools[*tool]
		switch {
		case files == nil && *tool != "sql":
			return core.Mistakef("schema print: --format must be sql, %s", strings.Join(tools, " or "))
		case files == nil && (*dir != "" || *dry):
			return core.Mistakef("schema print: --dir and --dry-run need the --format of a tool")
		case files != nil && *dir == "":
			return core.Mistakef("schema print: set --dir")
		case files != nil && *down:
			return core.Mistakef("schema print: --down is for the format sql: the files of a tool contain it, except for atlas")
		}
		all, err := o.migrations()
		if err != nil {
			return err
		}
		if files == nil {
			return printSchema(cmd, all, *down)
		}
		return writeSchema(cmd, all, files, *dir, *dry)
	}
	return cmd
}

func printSchema(cmd *cobra.Command, all []migration, down bool) error {
	if down {
		all = slices.Clone(all)
		slices.Reverse(all)
	}
	type step struct {
		Name string `json:"name"`
		SQL  string `json:"sql"`
	}
	steps := []step{}
	for _, m := range all {
		sql := m.up
		if down {
			sql = m.down
		}
		steps = append(steps, step{m.file(""), sql})
	}
	if wantsJSON(cmd) {
		return printJSON(cmd, steps)
	}
	for _, s := range steps {
		fmt.Fprintf(cmd.OutOrStdout(), "-- %s\n%s\n", s.Name, s.SQL)
	}
	return nil
}

// writeSchema writes the files that are missing.
func writeSchema(cmd *cobra.Command, all []migration, files func(migration) map[string]string, dir string, dry bool) error {
	texts, err := missingFiles(all, files, dir)
	if err != nil {
		return err
	}
	written := slices.AppendSeq([]string{}, maps.Keys(texts)) // not null in JSON
	slices.Sort(written)
	for _, path := range written {
		if dry {
			break
		}
		if err := os.WriteFile(path, []byte(texts[path]), 0o644); err != nil {
			return err
		}
	}
	if wantsJSON(cmd) {
		return printJSON(cmd, written)
	}
	for _, path := range written {
		fmt.Fprintln(cmd.OutOrStdout(), path)
	}
	return nil
}

// numbered matches the name of a migration tool's file.
var numbered = regexp.MustCompile(`^(\d{1,18})_(.+)$`)

// numbersIn returns the numbers of the files in a folder, by the rest of their names, and the highest one.
func numbersIn(dir string) (numbers map[string]int, highest int, err error) {
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, 0, err
	}
	numbers = map[string]int{}
	for _, entry := range entries {
		if match := numbered.FindStringSubmatch(entry.Name()); match != nil {
			number, _ := strconv.Atoi(match[1]) // 18 digits at most
			numbers[match[2]] = number
			highest = max(highest, number)
		}
	}
	return numbers, highest, nil
}

func withoutNumber(name string) string {
	if match := numbered.FindStringSubmatch(name); match != nil {
		return match[2]
	}
	return name
}

// missingFiles returns the texts of the files that do not exist, by path. All files are compared before any is written.
func missingFiles(all []migration, files func(migration) map[string]string, dir string) (map[string]string, error) {
	missing := map[string]string{}
	numbers, highest, err := numbersIn(dir)
	if err != nil {
		return nil, err
	}
	for _, m := range all {
		m.number = 0
		for name := range files(m) {
			if number, there := numbers[withoutNumber(name)]; there {
				m.number = number
			}
		}
		if m.number == 0 {
			highest++
			m.number = highest
		}
		for name, text := range files(m) {
			path := filepath.Join(dir, name)
			there, err := os.ReadFile(path)
			switch {
			case errors.Is(err, fs.ErrNotExist):
				missing[path] = text
			case err != nil:
				return nil, err
			case string(there) != text:
				return nil, fmt.Errorf("%s is there with another content", path)
			}
		}
	}
	return missing, nil
}

// migration is one step of a part's schema, with the SQL that undoes it.
type migration struct {
	// number is unique: the file's number, which no other package uses, and two digits for the parts of one
	// kind.
	number   int
	name     string
	up, down string
}

// schemaFile matches the names of a part's files.
var schemaFile = regexp.MustCompile(`^(\d{4})_([a-z0-9_]+)(\.down)?\.sql$`)

// migrations returns the steps of all parts, in order. Parts that share tables share the steps.
func (o *commands) migrations() ([]migration, error) {
	var all []migration
	for _, p := range o.Parts() {
		schema, ok := p.Part.(interface{ Schema() fs.FS })
		if !ok {
			continue
		}
		own, err := migrationsOf(schema.Schema())
		if err != nil {
			return nil, fmt.Errorf("%s: %w", p.Name, err)
		}
		for _, m := range own {
			same := func(other migration) bool { return other.number/100 == m.number/100 }
			if slices.ContainsFunc(all, func(other migration) bool { return same(other) && other.up == m.up }) {
				continue
			}
			for slices.ContainsFunc(all, func(other migration) bool { return other.number == m.number }) {
				m.number++
			}
			if m.number%100 > 0 {
				m.name += "_" + strconv.Itoa(m.number%100)
			}
			all = append(all, m)
		}
	}
	slices.SortFunc(all, func(a, b migration) int { return a.number - b.number })
	return all, nil
}

func migrationsOf(files fs.FS) ([]migration, error) {
	names, err := fs.Glob(files, "*.sql")
	if err != nil {
		return nil, err
	}
	found := map[int]*migration{}
	var order []int
	for _, name := range names {
		match := schemaFile.FindStringSubmatch(name)
		if match == nil {
			return nil, fmt.Errorf("file %q is not named like 0001_create.sql", name)
		}
		text, err := fs.ReadFile(files, name)
		if err != nil {
			return nil, err
		}
		number, _ := strconv.Atoi(match[1]) // four digits
		if found[number] == nil {
			found[number] = &migration{number: number * 100, name: match[2]}
			order = append(order, number)
		}
		if match[3] != "" {
			found[number].down = strings.TrimSpace(string(text)) + "\n"
		} else {
			found[number].up = strings.TrimSpace(string(text)) + "\n"
		}
	}
	slices.Sort(order)
	all := make([]migration, len(order))
	for i, number := range order {
		all[i] = *found[number]
	}
	return all, nil
}

// schemaTools have a function for each tool, which returns a migration's files by name.
var schemaTools = map[string]func(m migration) map[string]string{
	"goose": func(m migration) map[string]string {
		statement := func(sql string) string { return "-- +goose StatementBegin\n" + sql + "-- +goose StatementEnd\n" }
		return map[string]string{m.file(".sql"): "-- +goose Up\n" + statement(m.up) + "\n-- +goose Down\n" + statement(m.down)}
	},
	"golang-migrate": func(m migration) map[string]string {
		return map[string]string{m.file(".up.sql"): m.up, m.file(".down.sql"): m.down}
	},
	"atlas": func(m migration) map[string]string { return map[string]string{m.file(".sql"): m.up} },
}

func (m migration) file(suffix string) string {
	return fmt.Sprintf("%06d_holdfast_%s%s", m.number, m.name, suffix)
}

// granter is a part that lists the privileges that a database role needs for a job.
type granter interface {
	Grants(job string) []string
}

// roleJobs are the jobs of all packages.
var roleJobs = []string{"write", "relay", "consume", "idempotency", "sweep", "operate"}

// schemaGrants prints the privileges that a database role needs.
func (o *commands) schemaGrants() *cobra.Command {
	cmd := &cobra.Command{
		Use: "grants", Short: "Print the privileges that a role needs for its jobs, and no more", Args: noArguments,
		Long: "Print the privileges that a database role needs for its jobs, and no more, as SQL for the owner of the tables. Tables that\n" +
			"the service's own handlers, sweeps and transactions use are not in it. Jobs are " + strings.Join(roleJobs, ", ") + ".",
	}
	chosen := cmd.Flags().StringSlice("job", nil, "for this `job`, or several")
	to := cmd.Flags().String("to", "", "the `role`, which must exist")
	complete(cmd, "job", several(roleJobs))
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		switch {
		case len(*chosen) == 0:
			return core.Mistakef("schema grants: set --job: %s", strings.Join(roleJobs, ", "))
		case *to == "" || len(*to) > 63 || core.Plain(*to) != *to:
			return core.Mistakef("schema grants: set --to: the name of a role, at most 63 bytes")
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

// grants returns the statements for the jobs, each once. A job that no part has is a usage error.
func (o *commands) grants(chosen []string, to string) ([]string, error) {
	statements := []string{} // not null in JSON
	for _, job := range chosen {
		if !slices.Contains(roleJobs, job) {
			return nil, core.Mistakef("schema grants: --job: %.40q is none of %s", job, strings.Join(roleJobs, ", "))
		}
		found := false
		for _, p := range o.Parts() {
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
			return nil, core.Mistakef("schema grants: no part here does the job %s on Postgres", job)
		}
	}
	return statements, nil
}

const (
	doctorTimeout = 30 * time.Second
	// pingTimeout leaves doctor time to check the servers that answer.
	pingTimeout = doctorTimeout / 3
	// findingsAlike is how many findings with the same fix are printed one by one.
	findingsAlike = 2
)

// doctor prints the problems that the packages find. It changes nothing.
func (o *commands) doctor() *cobra.Command {
	cmd := &cobra.Command{
		Use: "doctor", Short: "Check the servers for missing or wrong settings", Args: noArguments,
		Long: "Check the servers for missing or wrong settings. It changes nothing, and exits with 1 if there is something to fix.",
	}
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		ctx, cancel := context.WithTimeout(cmd.Context(), doctorTimeout)
		defer cancel()
		var found []core.Found
		var failed []error
		if err := o.reach(ctx); err != nil {
			failed = append(failed, err) // one per server, not one per check
		} else {
			found, failed = o.Check(ctx)
		}
		if err := errors.Join(append(failed, printFindings(cmd, found, len(failed) == 0))...); err != nil {
			return err
		}
		if len(found) > 0 {
			return &exitError{code: exitFailed}
		}
		return nil
	}
	return cmd
}

// reach returns an error for each server that does not answer.
func (o *commands) reach(ctx context.Context) error {
	errs := make([]error, len(o.Config.Servers))
	var asking sync.WaitGroup
	for i, s := range o.Config.Servers {
		asking.Go(func() {
			ctx, cancel := context.WithTimeout(ctx, pingTimeout)
			defer cancel()
			if err := s.Ping(ctx); err != nil {
				errs[i] = fmt.Errorf("%s is unreachable: %w", s.Name, err)
			}
		})
	}
	asking.Wait()
	return errors.Join(errs...)
}

// printFindings prints the findings. whole reports that every check could run.
func printFindings(cmd *cobra.Command, findings []core.Found, whole bool) error {
	if wantsJSON(cmd) {
		type one struct {
			Problem string `json:"problem"`
			Fix     string `json:"fix"`
		}
		all := []one{}
		for _, f := range findings {
			all = append(all, one{f.Problem(), f.Fix()})
		}
		return printJSON(cmd, all)
	}
	if len(findings) == 0 {
		if whole {
			fmt.Fprintln(cmd.OutOrStdout(), "no problems found")
		}
		return nil
	}
	printAlike(cmd.OutOrStdout(), findings)
	fmt.Fprintf(cmd.OutOrStdout(), "findings: %d; the command setup creates what does not exist\n", len(findings))
	return nil
}

// printAlike prints findings with the same fix together. Of many it prints the first ones.
func printAlike(w io.Writer, findings []core.Found) {
	type kind struct{ component, fix string }
	problems := map[kind][]string{}
	var kinds []kind
	for _, f := range findings {
		component, _, _ := strings.Cut(f.Problem(), ":")
		k := kind{component, f.Fix()}
		if problems[k] == nil {
			kinds = append(kinds, k)
		}
		problems[k] = append(problems[k], f.Problem())
	}
	for _, k := range kinds {
		alike := problems[k]
		for _, problem := range alike[:min(len(alike), findingsAlike)] {
			fmt.Fprintln(w, core.Plain(problem))
		}
		if more := len(alike) - findingsAlike; more > 0 {
			fmt.Fprintf(w, "%s: and %d more\n", k.component, more)
		}
		fmt.Fprintf(w, "\tfix: %s\n", core.Plain(k.fix))
	}
}
