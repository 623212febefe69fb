package main

import (
	"fmt"
	"path"
	"slices"
	"strings"
)

// render is the report, whose head says where it comes from.
func render(head string, all []outcome) string {
	var text strings.Builder
	text.WriteString("# Versions\n\n" + head + "\n\nThe suites of the adapters run on servers of Debian's releases. A version is what the server itself answered; a\n" +
		"number is how many tests passed. Suites of PostgreSQL run behind the PgBouncer named too.\n")
	for _, product := range []string{"PostgreSQL", "Redis", "Valkey", "RabbitMQ"} {
		table(&text, product, all)
	}
	return text.String()
}

// table has a row for each version of a product, and a column for each suite.
func table(text *strings.Builder, product string, all []outcome) {
	head := false
	for _, o := range all {
		if o.Product != product {
			continue
		}
		if !head {
			head = true
			fmt.Fprintf(text, "\n## %s\n\n| version | release |", product)
			for _, s := range o.Suites {
				fmt.Fprintf(text, " %s |", path.Base(s.Package))
			}
			fmt.Fprintf(text, "\n|---|---|%s\n", strings.Repeat("---|", len(o.Suites)))
		}
		fmt.Fprintf(text, "| %s | %s |", o.Version, o.Release)
		for _, s := range o.Suites {
			fmt.Fprintf(text, " %s |", s)
		}
		text.WriteByte('\n')
	}
}

func (s suite) String() string {
	if len(s.Failed) > 0 {
		return "failed: " + strings.Join(s.Failed, ", ")
	}
	if s.Skipped > 0 {
		return fmt.Sprintf("%d passed, %d skipped", s.Passed, s.Skipped)
	}
	return fmt.Sprintf("%d passed", s.Passed)
}

// tested says which versions a report is about, in the words of the README: of all but PostgreSQL the minor version, too.
func tested(report string) []string {
	var names []string
	for _, part := range strings.Split(report, "\n## ")[1:] {
		product, rows, _ := strings.Cut(part, "\n")
		var versions []string
		for line := range strings.Lines(rows) {
			cells := strings.Split(line, " | ")
			parts := strings.Split(strings.TrimPrefix(cells[0], "| "), ".")
			if len(cells) < 3 || len(parts) < 2 || parts[0] == "" {
				continue // not of a server
			}
			version := parts[0]
			if product != "PostgreSQL" {
				version += "." + parts[1]
			}
			if !slices.Contains(versions, version) {
				versions = append(versions, version)
			}
		}
		names = append(names, product+" "+list(versions))
	}
	return names
}

// list is "a, b and c".
func list(words []string) string {
	last := len(words) - 1
	if last < 1 {
		return strings.Join(words, "")
	}
	return strings.Join(words[:last], ", ") + " and " + words[last]
}
