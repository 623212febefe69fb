package inboxnats

import (
	"cmp"
	"fmt"
	"maps"
	"strconv"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/internal/wire"
	"github.com/holdfast-go/holdfast/modules/nats/internal/form"
)

// maxAttempt bounds counts in headers.
const maxAttempt = 1_000_000

// message returns the message of decoded headers and a body. Unreadable fields stay empty, and inbox.Message.Validate
// reports them. A dead letter that was put back without DeadLetters counts as a replay.
func message(all map[string]string, body []byte, queue string, by *wire.Symfony) *inbox.Message {
	m := read(all, body, queue, by)
	if all[wire.HeaderClass] != "" {
		m.Replays++
		m.Attempt, m.Recovered, m.FirstFailedAt, m.History = 1, 0, time.Time{}, nil
	}
	return m
}

func read(all map[string]string, body []byte, queue string, by *wire.Symfony) *inbox.Message {
	var sent map[string]string
	for name, value := range all {
		if form.Sent(name) {
			if sent == nil {
				sent = make(map[string]string, len(all))
			}
			sent[name] = value
		}
	}
	headers, body, media, readable := by.Opened(sent, body, cmp.Or(all[form.ContentType], wire.JSON))
	attempt := min(max(number(all[wire.HeaderAttempt]), 1), maxAttempt)
	m := &inbox.Message{
		ID: by.ID(all[form.ID], headers), Name: by.Name(all[form.Name], headers), Body: body, ContentType: media,
		ContentEncoding: all[form.ContentEncoding], CorrelationID: all[form.CorrelationID], ReplyTo: all[form.ReplyTo], Key: cmp.Or(all[wire.HeaderKey], wire.EventAttribute(headers, "partitionkey")),
		Headers: headers, Queue: queue, Attempt: attempt,
		Recovered:     min(max(number(all[wire.HeaderRecovered]), 0), attempt-1),
		Replays:       min(max(number(all[wire.HeaderReplays]), 0), maxAttempt),
		FirstFailedAt: moment(all[wire.HeaderFirstFailed]), History: driver.DecodeHistory(all[wire.HeaderHistory]),
	}
	m.PublishedAt = wire.PublishedAt(moment(all[form.CreatedAt]), headers, m.ID)
	if !readable { // no handler must mistake the envelope for its own JSON
		m.Name = ""
	}
	return m
}

// number returns 0 for text that is not a number.
func number(text string) int {
	n, err := strconv.Atoi(text)
	if err != nil {
		return 0
	}
	return n
}

// moment returns the zero time for text that is not a time.
func moment(text string) time.Time {
	t, err := time.Parse(time.RFC3339Nano, text)
	if err != nil {
		return time.Time{}
	}
	return t
}

// copied is a copy of a message for another subject.
type copied struct {
	subject string
	all     map[string]string
	body    []byte
	id      string // Nats-Msg-Id
}

// copyHeaders returns the sender's headers and the non-empty ones of ours.
func copyHeaders(all, own map[string]string) map[string]string {
	headers := maps.Clone(all)
	maps.DeleteFunc(headers, func(name, _ string) bool { return wire.Own(name) && name != wire.HeaderKey })
	for name, value := range own {
		if value != "" {
			headers[name] = value
		}
	}
	return headers
}

func (c *copied) msg() *nats.Msg {
	msg := &nats.Msg{Subject: c.subject, Data: c.body, Header: form.Encode(c.all)}
	msg.Header[nats.MsgIdHdr] = []string{c.id}
	return msg
}

// slim removes the sender's headers and the history from a copy that is too large.
func (c *copied) slim() {
	maps.DeleteFunc(c.all, func(name, _ string) bool {
		return form.Sent(name) && !wire.Identifies(name) || name == wire.HeaderHistory
	})
}

// copyOf returns the copy that a move stores.
func (s *source) copyOf(m driver.Move) *copied {
	d := m.Delivery.(*delivery)
	c := &copied{
		subject: s.later, body: d.msg.Data,
		id: fmt.Sprintf("%s.%d.%d.%d.%d", d.meta.Stream, d.meta.Sequence.Stream, d.meta.Timestamp.UnixNano(), m.Target, m.Next.Attempt),
	}
	if m.Target == driver.ToDead {
		letter := m.DeadLetter
		c.subject = s.letter(s.places, letter.Class)
		c.all = copyHeaders(d.headers(), map[string]string{
			wire.HeaderAttempt: strconv.Itoa(letter.Attempts), wire.HeaderRecovered: count(letter.Message.Recovered),
			wire.HeaderReplays: count(letter.Message.Replays), wire.HeaderClass: letter.Class, wire.HeaderError: letter.Error,
			wire.HeaderErrorType: letter.ErrorType, wire.HeaderSQLState: letter.SQLState, wire.HeaderFingerprint: letter.Fingerprint,
			wire.HeaderHistory: driver.EncodeHistory(letter.Message.History), wire.HeaderFirstFailed: timeText(letter.FirstFailedAt),
			wire.HeaderLastFailed: timeText(letter.FailedAt), wire.HeaderConsumer: letter.Consumer,
		})
		return c
	}
	if m.PutOff {
		c.subject = s.putOff
	}
	delay := m.Delay
	if m.Target == driver.ToTail {
		delay = tailDelay
	}
	c.all = copyHeaders(d.headers(), map[string]string{
		wire.HeaderAttempt: strconv.Itoa(max(m.Next.Attempt, 1)), wire.HeaderRecovered: count(m.Next.Recovered),
		wire.HeaderReplays: count(d.Message().Replays), wire.HeaderFirstFailed: timeText(m.Next.FirstFailedAt),
		wire.HeaderHistory: driver.EncodeHistory(m.Next.History), wire.HeaderWait: count(int((delay + time.Millisecond - 1).Milliseconds())),
	})
	return c
}

// due is the remaining delay of a retry, which started when the server stored the copy. The server's clock set that
// time and this host's clock reads it as the age of the copy. A host whose clock is late waits for the delay at most once
// more: if the copy comes again and still has a negative age, the wait is over.
func due(wait string, age time.Duration, again bool) time.Duration {
	delay := time.Duration(number(wait)) * time.Millisecond
	if again && age < 0 {
		return 0
	}
	return min(delay-age, delay)
}

// readDead decodes a dead letter.
func readDead(all map[string]string, body []byte, queue, class string, by *wire.Symfony) inbox.DeadLetter {
	m := read(all, body, queue, by)
	return inbox.DeadLetter{
		Message: *m, Class: cmp.Or(all[wire.HeaderClass], class), Error: all[wire.HeaderError], ErrorType: all[wire.HeaderErrorType],
		SQLState: all[wire.HeaderSQLState], Fingerprint: all[wire.HeaderFingerprint], Attempts: m.Attempt,
		FirstFailedAt: m.FirstFailedAt, FailedAt: moment(all[wire.HeaderLastFailed]), Consumer: all[wire.HeaderConsumer],
	}
}

func count(n int) string {
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
