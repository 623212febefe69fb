// Package record is the record of a message's attempts in headers whose values are texts, on Redis and NATS.
package record

import (
	"cmp"
	"strconv"
	"time"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/internal/wire"
)

// maxCount bounds counts that come from outside.
const maxCount = 1_000_000

// Header returns the value of a header, or "".
type Header func(name string) string

// Read sets the attempts of a message. Unreadable values count as missing.
func Read(m *inbox.Message, header Header) {
	m.Attempt = min(max(Number(header(wire.HeaderAttempt)), 1), maxCount)
	m.Recovered = min(max(Number(header(wire.HeaderRecovered)), 0), m.Attempt-1)
	m.Replays = replays(header)
	m.FirstFailedAt = Time(header(wire.HeaderFirstFailed))
	m.History = driver.DecodeHistory(header(wire.HeaderHistory))
}

// PutBack makes a dead letter that was put back without DeadLetters count as a replay.
func PutBack(m *inbox.Message, header Header) {
	if header(wire.HeaderClass) != "" {
		m.Replays++
		m.Attempt, m.Recovered, m.FirstFailedAt, m.History = 1, 0, time.Time{}, nil
	}
}

// ReadDead returns the dead letter that Dead has recorded, of a message that Read has read. Class is its default class.
func ReadDead(m *inbox.Message, class string, header Header) inbox.DeadLetter {
	return inbox.DeadLetter{
		Message: *m, Class: cmp.Or(header(wire.HeaderClass), class), Error: header(wire.HeaderError), ErrorType: header(wire.HeaderErrorType),
		SQLState: header(wire.HeaderSQLState), Fingerprint: header(wire.HeaderFingerprint), Attempts: m.Attempt,
		FirstFailedAt: m.FirstFailedAt, FailedAt: Time(header(wire.HeaderLastFailed)), Consumer: header(wire.HeaderConsumer),
	}
}

// Next returns the headers of a copy for the next attempt. Headers without a value are not sent.
func Next(m *inbox.Message, next driver.Progress) map[string]string {
	return map[string]string{
		wire.HeaderAttempt: strconv.Itoa(max(next.Attempt, 1)), wire.HeaderRecovered: Count(next.Recovered), wire.HeaderReplays: Count(m.Replays),
		wire.HeaderFirstFailed: timeText(next.FirstFailedAt), wire.HeaderHistory: driver.EncodeHistory(next.History),
	}
}

// Dead returns the headers of a dead letter.
func Dead(letter inbox.DeadLetter) map[string]string {
	return map[string]string{
		wire.HeaderAttempt: strconv.Itoa(letter.Attempts), wire.HeaderRecovered: Count(letter.Message.Recovered),
		wire.HeaderReplays: Count(letter.Message.Replays), wire.HeaderClass: letter.Class, wire.HeaderError: letter.Error,
		wire.HeaderErrorType: letter.ErrorType, wire.HeaderSQLState: letter.SQLState, wire.HeaderFingerprint: letter.Fingerprint,
		wire.HeaderHistory: driver.EncodeHistory(letter.Message.History), wire.HeaderFirstFailed: timeText(letter.FirstFailedAt),
		wire.HeaderLastFailed: timeText(letter.FailedAt), wire.HeaderConsumer: letter.Consumer,
	}
}

// Replayed returns the headers of a dead letter as a message that was never tried.
func Replayed(header Header) map[string]string {
	return map[string]string{wire.HeaderReplays: strconv.Itoa(replays(header) + 1)}
}

func replays(header Header) int { return min(max(Number(header(wire.HeaderReplays)), 0), maxCount) }

// Number returns 0 for text that is not a number.
func Number(text string) int {
	n, err := strconv.Atoi(text)
	if err != nil {
		return 0
	}
	return n
}

// Time returns the zero time for text that is not a time.
func Time(text string) time.Time {
	t, err := time.Parse(time.RFC3339Nano, text)
	if err != nil {
		return time.Time{}
	}
	return t
}

// Count returns "" for 0.
func Count(n int) string {
	if n <= 0 {
		return ""
	}
	return strconv.Itoa(n)
}

func timeText(t time.Time) string {
	if t.IsZero() {
		return ""
	}
	return t.UTC().Format(time.RFC3339Nano)
}
