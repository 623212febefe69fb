package command

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"unicode/utf8"

	"github.com/schollz/progressbar/v3"
	"github.com/spf13/cobra"

	"github.com/holdfast-go/holdfast/modules/operator/internal/core"
)

// wantsJSON reports whether --json was given.
func wantsJSON(cmd *cobra.Command) bool {
	yes, err := cmd.Flags().GetBool("json")
	return err == nil && yes
}

// printJSON prints one value, indented.
func printJSON(cmd *cobra.Command, v any) error { return printJSONTo(cmd.OutOrStdout(), v) }

func printJSONTo(w io.Writer, v any) error {
	var text bytes.Buffer
	e := json.NewEncoder(&text)
	e.SetEscapeHTML(false)
	e.SetIndent("", "  ")
	if err := e.Encode(v); err != nil {
		return err
	}
	_, err := w.Write(escaped(text.Bytes()))
	return err
}

// escaped writes those characters of a JSON text as \uXXXX that change a terminal: encoding/json leaves
// the ones beyond ASCII as they are. They occur within strings only, so the value stays the same.
func escaped(text []byte) []byte {
	if !bytes.ContainsFunc(text, unsafeInJSON) {
		return text
	}
	safe := make([]byte, 0, len(text)+64)
	for _, r := range string(text) {
		if unsafeInJSON(r) {
			safe = fmt.Appendf(safe, `\u%04x`, r)
		} else {
			safe = utf8.AppendRune(safe, r)
		}
	}
	return safe
}

func unsafeInJSON(r rune) bool { return r != '\n' && core.ChangesTerminal(r) }

// table prints rows below their heads, in columns. Nothing is printed where there are no rows.
type table struct {
	w    *tabwriter.Writer
	head []string
}

func newTable(w io.Writer, head ...string) *table {
	return &table{tabwriter.NewWriter(w, 0, 0, 2, ' ', 0), head}
}

func (t *table) row(cells ...any) {
	if t.head != nil {
		fmt.Fprintln(t.w, strings.Join(t.head, "\t"))
		t.head = nil
	}
	texts := make([]string, len(cells))
	for i, cell := range cells {
		texts[i] = core.Plain(fmt.Sprint(cell))
	}
	fmt.Fprintln(t.w, strings.Join(texts, "\t"))
}

func (t *table) flush() error { return t.w.Flush() }

// below prints a table below others, after a line between. It is w's.
func (t *table) below(w io.Writer) error {
	if t.head != nil {
		return nil // no rows
	}
	fmt.Fprintln(w)
	return t.flush()
}

// manyMessages is how many messages are worth a bar.
const manyMessages = 100

// withProgress has a change draw a bar on a terminal's error output, where it takes long: there are many
// messages, or they are paced.
func (o *commands) withProgress(cmd *cobra.Command, what string, p core.Place, f core.Filter, c core.Change) (core.Change, func()) {
	nothing := func() {}
	if c.DryRun || !isTerminal(cmd.ErrOrStderr()) {
		return c, nothing
	}
	dry := c
	dry.DryRun, dry.Edit = true, nil
	would, _ := o.Apply(cmd.Context(), what, p, f, dry) // the change itself will say what is wrong
	n := would.Returned + would.Failed
	if n == 0 || n < manyMessages && c.PerSecond == 0 {
		return c, nothing
	}
	bar := progressbar.NewOptions(n, progressbar.OptionSetWriter(cmd.ErrOrStderr()), progressbar.OptionSetDescription(p.Name),
		progressbar.OptionShowCount(), progressbar.OptionSetPredictTime(true), progressbar.OptionClearOnFinish())
	c.Progress = func(r core.Replayed) { _ = bar.Set(min(r.Returned+r.Failed, n)) } // a bar that cannot be drawn is no failure
	return c, func() { _ = bar.Finish() }
}

// atWork shows on a terminal's error output what is worked on until done is called, for work of unknown length.
func atWork(cmd *cobra.Command, what string) (done func()) {
	if !isTerminal(cmd.ErrOrStderr()) {
		return func() {}
	}
	bar := progressbar.NewOptions(-1, progressbar.OptionSetWriter(cmd.ErrOrStderr()), progressbar.OptionSetDescription(what),
		progressbar.OptionSetElapsedTime(true), progressbar.OptionClearOnFinish())
	_ = bar.RenderBlank() // a bar that cannot be drawn is no failure
	return func() { _ = bar.Finish() }
}
