package core

import (
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"
	"unicode"
)

// OneLine is an error on one line, however many are joined in it.
func OneLine(err error) string { return strings.ReplaceAll(err.Error(), "\n", "; ") }

// TextOf is an error on one line; empty for nil.
func TextOf(err error) string {
	if err == nil {
		return ""
	}
	return OneLine(err)
}

// Age is a number of seconds in a column.
func Age(seconds float64) string { return span(time.Duration(seconds * float64(time.Second))) }

// ChangesTerminal reports whether a character does more to a terminal than appear: it controls it, ends a line or turns
// the direction of one.
func ChangesTerminal(r rune) bool {
	return unicode.IsControl(r) || unicode.Is(unicode.Bidi_Control, r) || r == '\u2028' || r == '\u2029'
}

// Plain is a text that keeps a terminal as it is: control characters, of a message's name for example,
// and those that turn the direction of a line are shown as spaces.
func Plain(text string) string {
	return strings.Map(func(r rune) rune {
		if ChangesTerminal(r) {
			return ' '
		}
		return r
	}, text)
}

// Short cuts a text for a column.
func Short(text string, limit int) string {
	runes := []rune(text)
	if len(runes) <= limit {
		return text
	}
	return string(runes[:limit-1]) + "…"
}

// Moment is a time in a column: in UTC, to the second.
func Moment(at time.Time) string {
	if at.IsZero() {
		return "-"
	}
	return at.UTC().Format(time.RFC3339)
}

// Rate is how many a second.
func Rate(perSecond *float64) string { return strconv.FormatFloat(*perSecond, 'f', 1, 64) }

// Percent is a part of 1.
func Percent(part float64) string { return strconv.Itoa(int(math.Round(part*100))) + " %" }

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
