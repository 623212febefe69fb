package operator

import (
	"fmt"
	"io/fs"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// migration is one step of the schema of a part, and what undoes it.
type migration struct {
	// number is not that of any other: the file's, which no other package has, and two digits for the
	// parts of one kind.
	number   int
	name     string
	up, down string
}

// schemaFile is what a part names its files.
var schemaFile = regexp.MustCompile(`^(\d{4})_([a-z0-9_]+)(\.down)?\.sql$`)

// migrations are those of all parts, in their order. Parts that share their tables have one.
func (o *Operator) migrations() ([]migration, error) {
	var all []migration
	for _, p := range o.cfg.parts() {
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
			return nil, fmt.Errorf("file %q is not named 0001_what.sql", name)
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

// A writer of files makes those of a tool out of a migration.
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
