package operator

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
)

// schema prints the tables for a migration tool.
func (o *Operator) schema() *cobra.Command {
	return parent("schema", "The tables, for a migration tool, and who may do what with them", o.schemaPrint(), o.schemaGrants())
}

func (o *Operator) schemaPrint() *cobra.Command {
	tools := slices.Sorted(maps.Keys(schemaTools))
	cmd := &cobra.Command{
		Use: "print", Short: "Print the tables as SQL, or write the files of a migration tool", Args: noArguments,
		Long: "Print the tables as SQL, or write the files of a migration tool.\n\n" +
			"Setup and a service's Migrate find done what the tool has done. Files that are there\n" +
			"already are left as they are; one with another content is an error. For atlas run `atlas migrate hash` afterwards.\n\n" +
			"A file that is new in the folder gets the number after the highest one there, so tools that only go forward apply it after\n" +
			"all others. The folder may be that of your own migrations. Keep it in version control, and print again after an upgrade.",
	}
	tool := cmd.Flags().String("format", "sql", "sql, or files for `tool`: "+strings.Join(tools, ", "))
	dir := cmd.Flags().String("dir", "", "the `folder` of the tool's files")
	down := cmd.Flags().Bool("down", false, "print what removes the tables, and all that is in them")
	dry := cmd.Flags().Bool("dry-run", false, "only tell which files would be written")
	complete(cmd, "format", among(append(tools, "sql")))
	_ = cmd.MarkFlagDirname("dir") // it is there
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		files := schemaTools[*tool]
		switch {
		case files == nil && *tool != "sql":
			return usagef("schema print: --format must be sql, %s", strings.Join(tools, " or "))
		case files == nil && (*dir != "" || *dry):
			return usagef("schema print: --dir and --dry-run want the --format of a tool")
		case files != nil && *dir == "":
			return usagef("schema print: say --dir")
		case files != nil && *down:
			return usagef("schema print: --down is for the format sql: the files of a tool have it already, but for atlas")
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

// numbered is the name of a migration tool's file.
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

// missingFiles are the texts of files that are not there, by their paths. All are compared before any is
// written.
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
