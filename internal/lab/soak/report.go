package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"time"
)

// report is what a part found out.
type report struct {
	Part     string
	Command  string
	Commit   string
	Began    time.Time
	Took     string
	Machine  string
	Notes    []string
	Tables   []table
	Findings []finding
}

// table has texts.
type table struct {
	Title   string
	Columns []string
	Rows    [][]string
}

func (t *table) add(cells ...string) { t.Rows = append(t.Rows, cells) }

// finding is what had to be true.
type finding struct {
	What string
	OK   bool
}

func (r *report) note(format string, args ...any) {
	r.Notes = append(r.Notes, fmt.Sprintf(format, args...))
}

func (r *report) find(ok bool, format string, args ...any) {
	r.Findings = append(r.Findings, finding{fmt.Sprintf(format, args...), ok})
}

// atMost finds that a figure is at most so many times what it was before.
func (r *report) atMost(what string, before, during, factor float64) {
	r.find(during <= factor*before, "%s: %.1f, before %.1f: at most %.2f times that", what, during, before, factor)
}

// errNotSo is in the error of a verdict.
var errNotSo = errors.New("not as they should be")

// verdict is an error if something was not true.
func (r *report) verdict() error {
	var wrong []error
	for _, f := range r.Findings {
		if !f.OK {
			wrong = append(wrong, errors.New(f.What))
		}
	}
	if len(wrong) == 0 {
		return nil
	}
	return fmt.Errorf("%s: %d of %d findings are %w: %w", r.Part, len(wrong), len(r.Findings), errNotSo, errors.Join(wrong...))
}

func (f finding) word() string {
	if f.OK {
		return "ok"
	}
	return "NOT SO"
}

// markdown is the report as a section of a document.
func (r *report) markdown() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s\n\n    %s\n\n%s UTC, commit %s, took %s, %s.\n", heading(r.Part), r.Command, r.Began.UTC().Format(time.DateTime), r.Commit, r.Took, r.Machine)
	for _, note := range r.Notes {
		fmt.Fprintf(&b, "\n%s\n", note)
	}
	for _, t := range r.Tables {
		fmt.Fprintf(&b, "\n%s:\n\n| %s |\n|%s\n", t.Title, strings.Join(t.Columns, " | "), strings.Repeat("---|", len(t.Columns)))
		for _, row := range t.Rows {
			fmt.Fprintf(&b, "| %s |\n", strings.Join(row, " | "))
		}
	}
	fmt.Fprint(&b, "\n| | finding |\n|---|---|\n")
	for _, f := range r.Findings {
		fmt.Fprintf(&b, "| %s | %s |\n", f.word(), f.What)
	}
	return b.String()
}

func heading(part string) string { return "## " + part }

const title = "# Soak\n\nWritten by `go run ./internal/lab/soak`; what the columns mean is in its package comment.\n"

// save writes the report into a file, as a section that replaces that of the last run of its part.
func (r *report) save(file string) error {
	old, err := os.ReadFile(file)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return os.WriteFile(file, []byte(replaceSection(string(old), r.Part, r.markdown())), 0o644)
}

// replaceSection replaces the section of a part in a document, or appends it.
func replaceSection(document, part, section string) string {
	if document == "" {
		document = title
	}
	begin := strings.Index(document, heading(part)+"\n")
	if begin < 0 {
		return strings.TrimRight(document, "\n") + "\n\n" + section
	}
	rest := document[begin+1:]
	if _, after, ok := strings.Cut(rest, "\n## "); ok {
		return document[:begin] + section + "\n## " + after
	}
	return document[:begin] + section
}
