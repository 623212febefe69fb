package driver

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/internal/base"
)

const (
	maxTypeBytes     = 128 // of a Go type's name
	sqlStateBytes    = 5
	fingerprintBytes = 16
	shapeWords       = 12 // words of an error text; the rest is mostly details
	ownModule        = "github.com/holdfast-go/holdfast/inbox"
)

// origin describes where an error comes from.
type origin struct {
	goType, sqlState string
	where            string // the function that panicked; "" without a panic
}

// originOf reads the chain of an error. If a method of the error panics, it returns the data read so far.
func originOf(err error) (o origin) {
	if err == nil {
		return origin{}
	}
	defer func() { _ = recover() }()
	if p, ok := errors.AsType[*base.Panic](err); ok {
		o.where = panicked(p.Stack)
		o.goType = truncate(fmt.Sprintf("%T", p.Value), maxTypeBytes)
	} else {
		o.goType = truncate(typeOf(err), maxTypeBytes)
	}
	if coded, ok := errors.AsType[interface {
		error
		SQLState() string
	}](err); ok && validSQLState(coded.SQLState()) {
		o.sqlState = coded.SQLState()
	}
	return o
}

// typeOf returns the type of the first error in a chain that is not a plain wrapper. Of joined errors it
// follows the first one. If all are wrappers, it returns the type of the last.
func typeOf(err error) string {
	for {
		name := fmt.Sprintf("%T", err)
		if !plainType(name) {
			return name
		}
		var inner error
		switch e := err.(type) {
		case interface{ Unwrap() error }:
			inner = e.Unwrap()
		case interface{ Unwrap() []error }:
			inner = errors.Join(e.Unwrap()...) // nil when there is none but nil
			if joined, ok := inner.(interface{ Unwrap() []error }); ok {
				inner = joined.Unwrap()[0]
			}
		}
		if inner == nil {
			return name
		}
		err = inner
	}
}

// plainType reports whether a type of error has no information about the failure.
func plainType(name string) bool {
	for _, prefix := range [...]string{"*fmt.", "*errors.", "*base.marked", "*inboxpgx.handlerError"} {
		if strings.HasPrefix(name, prefix) {
			return true
		}
	}
	return name == "" || name == "string"
}

func validSQLState(s string) bool {
	return len(s) == sqlStateBytes && strings.IndexFunc(s, func(r rune) bool {
		return (r < '0' || r > '9') && (r < 'A' || r > 'Z')
	}) < 0
}

// panicked returns the function of the program that panicked, from a debug.Stack taken at the recover. Line
// numbers are left out because they change with each release. If a deferred function panicked as well, the
// first panic is the last one in the stack.
func panicked(stack []byte) string {
	text := string(stack)
	_, text, found := strings.Cut(text[max(strings.LastIndex(text, "\npanic("), 0):], "\npanic(")
	if !found {
		return ""
	}
	var first string // used if all functions are in the standard library
	for line := range strings.Lines(text) {
		name, ok := frame(line)
		switch {
		case !ok:
			continue
		case strings.HasPrefix(name, ownModule) && !strings.Contains(name, "_test."): // the caller of the handler
			return truncate(cmp.Or(first, name), maxTypeBytes)
		case ofProgram(name):
			return truncate(name, maxTypeBytes)
		}
		first = cmp.Or(first, name)
	}
	return truncate(first, maxTypeBytes)
}

// frame returns the function name in a line of a stack, without its arguments.
func frame(line string) (name string, ok bool) {
	end := strings.LastIndexByte(line, '(')
	if end < 0 || strings.HasPrefix(line, "\t") || strings.HasPrefix(line, "{") ||
		strings.HasPrefix(line, "runtime.") || strings.HasPrefix(line, "created by ") {
		return "", false
	}
	return line[:end], true
}

// ofProgram reports whether a function is in package main or in a module whose path has a domain. The
// standard library has no domain.
func ofProgram(name string) bool {
	module, _, nested := strings.Cut(name, "/")
	return strings.HasPrefix(name, "main.") || nested && strings.Contains(module, ".")
}

// fingerprint groups failures. It uses the error text only if neither a type nor a function identifies the
// failure.
func fingerprint(d inbox.DeadLetter, where string) string {
	var shape string
	if where == "" {
		where = d.Message.Name
		if d.SQLState == "" && plainType(d.ErrorType) {
			shape = shapeOf(d.Error)
		}
	}
	sum := sha256.Sum256([]byte(strings.Join([]string{d.Class, d.ErrorType, d.SQLState, where, shape}, "\x00")))
	return hex.EncodeToString(sum[:fingerprintBytes/2])
}

// quoted matches text in quotation marks, which differs from message to message.
var quoted = regexp.MustCompile("\"[^\"]*\"|`[^`]*`")

// shapeOf returns the part of an error text that all failures of one kind have in common.
func shapeOf(text string) string {
	words := strings.Fields(quoted.ReplaceAllString(text, "0"))
	for i, word := range words {
		if strings.ContainsAny(word, "0123456789") {
			words[i] = "0"
		}
	}
	return strings.Join(words[:min(len(words), shapeWords)], " ")
}

// completed adds the fingerprint to a dead letter without one, such as one of an older version or made by
// hand.
func completed(d inbox.DeadLetter) inbox.DeadLetter {
	if !validFingerprint(d.Fingerprint) {
		d.Fingerprint = fingerprint(d, "")
	}
	return d
}

func validFingerprint(s string) bool {
	_, err := hex.DecodeString(s)
	return err == nil && len(s) == fingerprintBytes && s == strings.ToLower(s)
}

// The limits of a history. The first half has the first failures, which show how the trouble started.
const (
	MaxHistory         = 10
	maxHistoryError    = 200
	maxHistoryConsumer = 64
	// MaxHistoryBytes bounds the result of EncodeHistory.
	MaxHistoryBytes = 4 << 10
)

// Progressed returns the progress for the next attempt of a message that failed at the time now. An uncounted
// failure leaves it unchanged.
func Progressed(m *inbox.Message, f Failure, d Decision, consumer string, now time.Time) Progress {
	p := Progress{Attempt: max(m.Attempt, 1), Recovered: m.Recovered, FirstFailedAt: m.FirstFailedAt, History: m.History}
	if !d.Counted {
		return p
	}
	p.Attempt++
	if d.Recovered {
		p.Recovered++
	}
	if p.FirstFailedAt.IsZero() {
		p.FirstFailedAt = now
	}
	p.History = remember(m.History, inbox.FailedAttempt{At: now, Error: errorText(f, maxHistoryError), Consumer: consumer})
	return p
}

// remember returns a copy of a history with one more failure.
func remember(history []inbox.FailedAttempt, last inbox.FailedAttempt) []inbox.FailedAttempt {
	return bounded(append(slices.Clone(history), last))
}

// bounded shortens a history in place. It removes entries from the middle.
func bounded(history []inbox.FailedAttempt) []inbox.FailedAttempt {
	if extra := len(history) - MaxHistory; extra > 0 {
		history = slices.Delete(history, MaxHistory/2, MaxHistory/2+extra)
	}
	for i := range history {
		history[i].Error = truncate(history[i].Error, maxHistoryError)
		history[i].Consumer = truncate(history[i].Consumer, maxHistoryConsumer)
	}
	return history
}

// historyEntry is a failure on the wire.
type historyEntry struct {
	At       string `json:"at"`
	Consumer string `json:"consumer,omitempty"`
	Error    string `json:"error"`
}

// EncodeHistory returns a history as JSON of at most MaxHistoryBytes, the form used by every transport. To
// fit, it leaves out entries in the middle. For an empty history it returns "".
func EncodeHistory(history []inbox.FailedAttempt) string {
	history = bounded(slices.Clone(history))
	for ; len(history) > 0; history = slices.Delete(history, len(history)/2, len(history)/2+1) {
		if text := encoded(history); len(text) <= MaxHistoryBytes {
			return text
		}
	}
	return ""
}

func encoded(history []inbox.FailedAttempt) string {
	entries := make([]historyEntry, len(history))
	for i, a := range history {
		entries[i] = historyEntry{a.At.UTC().Format(time.RFC3339Nano), a.Consumer, a.Error}
	}
	var text bytes.Buffer
	lines := json.NewEncoder(&text)
	lines.SetEscapeHTML(false) // it would make the texts longer
	_ = lines.Encode(entries)  // strings can always be encoded
	return string(bytes.TrimSpace(text.Bytes()))
}

// DecodeHistory reads the result of EncodeHistory. The text comes from outside: if it is too long or
// malformed, the result is nil. Entries beyond MaxHistory are dropped.
func DecodeHistory(text string) []inbox.FailedAttempt {
	if text == "" || len(text) > MaxHistoryBytes {
		return nil
	}
	var entries []historyEntry
	if err := json.Unmarshal([]byte(text), &entries); err != nil {
		return nil
	}
	var history []inbox.FailedAttempt
	for _, e := range entries {
		at, err := time.Parse(time.RFC3339Nano, e.At)
		if err != nil {
			at = time.Time{}
		}
		history = append(history, inbox.FailedAttempt{At: at, Consumer: e.Consumer, Error: e.Error})
	}
	return bounded(history)
}
