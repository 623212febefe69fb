package inboxredis

import (
	"bytes"
	"maps"
	"strconv"
	"time"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/internal/wire"
)

// copied returns the fields of a copy for a command: those of the sender, whatever they are, and
// ours where they are not empty.
func copied(fields map[string]any, own map[string]string) []any {
	foreign := make(map[string]any, len(fields))
	for name, value := range fields {
		if !wire.Own(name) {
			foreign[name] = value
		}
	}
	var all []any
	for name, value := range packed(foreign) {
		all = append(all, name, value)
	}
	for name, value := range own {
		if value != "" {
			all = append(all, name, value)
		}
	}
	return all
}

// retryCopy is the next attempt of a message.
func retryCopy(d *delivery, next driver.Progress) []any {
	return copied(d.fields, map[string]string{
		wire.HeaderAttempt:     strconv.Itoa(max(next.Attempt, 1)),
		wire.HeaderRecovered:   count(next.Recovered),
		wire.HeaderReplays:     count(d.Message().Replays),
		wire.HeaderFirstFailed: timeText(next.FirstFailedAt),
		wire.HeaderHistory:     driver.EncodeHistory(next.History),
	})
}

// deadCopy is a message with why it was given up.
func deadCopy(d *delivery, letter inbox.DeadLetter) []any {
	return copied(d.fields, map[string]string{
		wire.HeaderAttempt:     strconv.Itoa(letter.Attempts),
		wire.HeaderRecovered:   count(letter.Message.Recovered),
		wire.HeaderReplays:     count(letter.Message.Replays),
		wire.HeaderClass:       letter.Class,
		wire.HeaderError:       letter.Error,
		wire.HeaderErrorType:   letter.ErrorType,
		wire.HeaderSQLState:    letter.SQLState,
		wire.HeaderFingerprint: letter.Fingerprint,
		wire.HeaderHistory:     driver.EncodeHistory(letter.Message.History),
		wire.HeaderFirstFailed: timeText(letter.FirstFailedAt),
		wire.HeaderLastFailed:  timeText(letter.FailedAt),
		wire.HeaderConsumer:    letter.Consumer,
	})
}

// replayCopy is a dead letter as a message that was never tried.
func replayCopy(fields map[string]any) []any {
	replays := min(max(number(fields[wire.HeaderReplays]), 0), maxAttempt)
	return copied(fields, map[string]string{wire.HeaderReplays: strconv.Itoa(replays + 1)})
}

// edited returns the fields with another body, where the body is all that they hold of it.
func edited(fields map[string]any, was, is []byte) (map[string]any, error) {
	all := maps.Clone(unpacked(fields))
	unreadable := all[fieldPacked] != nil
	if unreadable || text(all[fieldSymfony]) != "" || !bytes.Equal([]byte(text(all[fieldBody])), was) {
		return nil, driver.ErrNotEditable
	}
	all[fieldBody] = string(is)
	return all, nil
}

// readDead reads back what deadCopy wrote.
func readDead(fields map[string]any, stream, class string, by *wire.Symfony) inbox.DeadLetter {
	m := read(fields, by)
	m.Queue = stream
	if named := text(fields[wire.HeaderClass]); named != "" {
		class = named
	}
	return inbox.DeadLetter{
		Message:       *m,
		Class:         class,
		Error:         text(fields[wire.HeaderError]),
		ErrorType:     text(fields[wire.HeaderErrorType]),
		SQLState:      text(fields[wire.HeaderSQLState]),
		Fingerprint:   text(fields[wire.HeaderFingerprint]),
		Attempts:      m.Attempt,
		FirstFailedAt: m.FirstFailedAt,
		FailedAt:      moment(fields[wire.HeaderLastFailed]),
		Consumer:      text(fields[wire.HeaderConsumer]),
	}
}

func count(n int) string {
	if n == 0 {
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
