package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strings"
	"text/tabwriter"
	"time"
)

// report is what a part found out.
type report struct {
	Part     string    `json:"part"`
	Command  string    `json:"command"`
	Commit   string    `json:"commit"`
	Began    time.Time `json:"began"`
	Took     string    `json:"took"`
	Machine  string    `json:"machine"`
	Notes    []string  `json:"notes"`
	Tables   []table   `json:"tables"`
	Findings []finding `json:"findings"`
}

// table has texts, so that all three forms of a report show the same figures.
type table struct {
	Title   string     `json:"title"`
	Columns []string   `json:"columns"`
	Rows    [][]string `json:"rows"`
}

func (t *table) add(cells ...string) { t.Rows = append(t.Rows, cells) }

// finding is what had to be true.
type finding struct {
	What string `json:"what"`
	OK   bool   `json:"ok"`
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

// text is the report for a terminal.
func (r *report) text(out io.Writer) error {
	fmt.Fprintf(out, "\n%s: %s\n%s, commit %s, took %s, %s\n", r.Part, r.Command, r.Began.UTC().Format(time.DateTime), r.Commit, r.Took, r.Machine)
	for _, note := range r.Notes {
		fmt.Fprintln(out, note)
	}
	for _, t := range r.Tables {
		w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
		fmt.Fprintf(w, "\n%s\n%s\n", t.Title, strings.Join(t.Columns, "\t"))
		for _, row := range t.Rows {
			fmt.Fprintln(w, strings.Join(row, "\t"))
		}
		if err := w.Flush(); err != nil {
			return err
		}
	}
	fmt.Fprintln(out)
	for _, f := range r.Findings {
		fmt.Fprintf(out, "%-8s%s\n", f.word(), f.What)
	}
	return nil
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

// paths are the files into which reports are written; "" is none.
type paths struct{ json, markdown string }

// save writes the report as JSON into one file, and as a section into the other, where it replaces that
// of the last run of its part.
func (r *report) save(to paths) error {
	if to.json != "" {
		text, err := json.MarshalIndent(r, "", "  ")
		if err == nil {
			err = os.WriteFile(to.json, append(text, '\n'), 0o644)
		}
		if err != nil {
			return err
		}
	}
	if to.markdown == "" {
		return nil
	}
	old, err := os.ReadFile(to.markdown)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return os.WriteFile(to.markdown, []byte(replaceSection(string(old), r.Part, r.markdown())), 0o644)
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
