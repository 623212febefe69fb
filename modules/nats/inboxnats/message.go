package inboxnats

import (
	"cmp"
	"fmt"
	"maps"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/internal/inbox/record"
	"github.com/holdfast-go/holdfast/internal/wire"
	"github.com/holdfast-go/holdfast/modules/nats/internal/form"
)

// message returns the message of decoded headers and a body. Unreadable fields stay empty, and inbox.Message.Validate
// reports them.
func message(all map[string]string, body []byte, queue string, by *wire.Symfony) *inbox.Message {
	m := read(all, body, queue, by)
	record.PutBack(m, in(all))
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
	m := &inbox.Message{
		ID: by.ID(all[form.ID], headers), Name: by.Name(all[form.Name], headers), Body: body, ContentType: media,
		ContentEncoding: all[form.ContentEncoding], CorrelationID: all[form.CorrelationID], ReplyTo: all[form.ReplyTo], Key: cmp.Or(all[wire.HeaderKey], wire.EventAttribute(headers, "partitionkey")),
		Headers: headers, Queue: queue,
	}
	record.Read(m, in(all))
	m.PublishedAt = wire.PublishedAt(record.Time(all[form.CreatedAt]), headers, m.ID)
	if !readable { // no handler must mistake the envelope for its own JSON
		m.Name = ""
	}
	return m
}

// in returns the header of decoded headers.
func in(all map[string]string) record.Header { return func(name string) string { return all[name] } }

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
		c.subject = s.letter(s.places, m.DeadLetter.Class)
		c.all = copyHeaders(d.headers(), record.Dead(m.DeadLetter))
		return c
	}
	if m.PutOff {
		c.subject = s.putOff
	}
	delay := m.Delay
	if m.Target == driver.ToTail {
		delay = tailDelay
	}
	own := record.Next(d.Message(), m.Next)
	own[wire.HeaderWait] = record.Count(int((delay + time.Millisecond - 1).Milliseconds()))
	c.all = copyHeaders(d.headers(), own)
	return c
}

// due is the remaining delay of a retry, which started when the server stored the copy. The server's clock set that
// time and this host's clock reads it as the age of the copy. A host whose clock is late waits for the delay at most once
// more: if the copy comes again and still has a negative age, the wait is over.
func due(wait string, age time.Duration, again bool) time.Duration {
	delay := time.Duration(record.Number(wait)) * time.Millisecond
	if again && age < 0 {
		return 0
	}
	return min(delay-age, delay)
}
