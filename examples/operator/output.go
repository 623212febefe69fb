package operator

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/spf13/cobra"
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

func unsafeInJSON(r rune) bool { return r != '\n' && changesTerminal(r) }

// changesTerminal reports whether a character does more to a terminal than appear: it controls it, ends a line or turns
// the direction of one.
func changesTerminal(r rune) bool {
	return unicode.IsControl(r) || unicode.Is(unicode.Bidi_Control, r) || r == '\u2028' || r == '\u2029'
}

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
		texts[i] = plain(fmt.Sprint(cell))
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

// plain is a text that keeps a terminal as it is: control characters, of a message's name for example,
// and those that turn the direction of a line are shown as spaces.
func plain(text string) string {
	return strings.Map(func(r rune) rune {
		if changesTerminal(r) {
			return ' '
		}
		return r
	}, text)
}

// short cuts a text for a column.
func short(text string, limit int) string {
	runes := []rune(text)
	if len(runes) <= limit {
		return text
	}
	return string(runes[:limit-1]) + "…"
}

// moment is a time in a column: in UTC, to the second.
func moment(at time.Time) string {
	if at.IsZero() {
		return "-"
	}
	return at.UTC().Format(time.RFC3339)
}

// rate is how many a second.
func rate(perSecond *float64) string { return strconv.FormatFloat(*perSecond, 'f', 1, 64) }

// percent is a part of 1.
func percent(part float64) string { return strconv.Itoa(int(math.Round(part*100))) + " %" }

// span is a duration in a column.
func span(d time.Duration) string {
	switch {
	case d <= 0:
		return "0s"
	case d < time.Second:
		return d.Round(time.Millisecond).String()
	case d < time.Hour:
		return d.Round(time.Second).String()
	}
	return fmt.Sprintf("%dh%02dm", int(d.Hours()), int(d.Minutes())%60)
}
