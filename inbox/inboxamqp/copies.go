package inboxamqp

import (
	"slices"
	"strconv"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/internal/wire"
)

// duplicate returns the envelope and body of a delivery for publishing them again. Left out
// are the broker's own headers but for the slot, since they would be mistaken for the client's; the
// expiration, which would lose the copy; and the user id, which the broker only takes from that user.
func duplicate(d amqp.Delivery) amqp.Publishing {
	headers := make(amqp.Table, len(d.Headers)+8)
	for name, value := range d.Headers {
		if !wire.OfBroker(name) && (!wire.Own(name) || credible(name, value)) {
			headers[name] = value
		}
	}
	delete(headers, wire.HeaderDelay)
	if slot := slotOf(d.Headers); slot != "" {
		headers[wire.HeaderRoutes] = []any{slot}
	}
	if _, copied := headers[wire.HeaderOriginKey]; !copied {
		headers[wire.HeaderOriginExchange], headers[wire.HeaderOriginKey] = d.Exchange, d.RoutingKey
	}
	return amqp.Publishing{
		Headers:         headers,
		ContentType:     d.ContentType,
		ContentEncoding: d.ContentEncoding,
		DeliveryMode:    amqp.Persistent,
		Priority:        d.Priority,
		CorrelationId:   d.CorrelationId,
		ReplyTo:         d.ReplyTo,
		MessageId:       d.MessageId,
		Timestamp:       d.Timestamp,
		Type:            d.Type,
		AppId:           d.AppId,
		Body:            d.Body,
	}
}

// credible reports whether a header of ours can have been written by us, and not by a sender
// whose value would fill the copy.
func credible(name string, value any) bool {
	most := driver.MaxErrorBytes // the error is the longest but for the history
	if name == wire.HeaderHistory {
		most = driver.MaxHistoryBytes
	}
	text, ok := wire.HeaderString(value)
	return ok && len(text) <= most
}

// nextCopy is a message with what is known of its attempts.
func nextCopy(d amqp.Delivery, m *inbox.Message, next driver.Progress) amqp.Publishing {
	p := duplicate(d)
	if isDead(d) { // one that came back is none any more
		revive(p.Headers, m.Replays)
	}
	delete(p.Headers, wire.HeaderPutOff)
	delete(p.Headers, wire.HeaderWait)
	set(p.Headers, wire.HeaderAttempt, strconv.Itoa(next.Attempt), next.Attempt > 1)
	set(p.Headers, wire.HeaderRecovered, strconv.Itoa(next.Recovered), next.Recovered > 0)
	set(p.Headers, wire.HeaderFirstFailed, timeText(next.FirstFailedAt), !next.FirstFailedAt.IsZero())
	history := driver.EncodeHistory(next.History)
	set(p.Headers, wire.HeaderHistory, history, history != "")
	return p
}

// set gives a header a value, or takes it away.
func set(headers amqp.Table, name, value string, there bool) {
	if there {
		headers[name] = value
	} else {
		delete(headers, name)
	}
}

// cuts make room where the headers do not fit in a frame, the least important ones first.
var cuts = [...]func(headers amqp.Table){
	func(headers amqp.Table) {
		identity := [...]string{wire.HeaderType, stampHeader(headers), headerContentType}
		for name, value := range headers {
			_, readable := wire.HeaderString(value)
			if !wire.Own(name) && name != wire.HeaderRoutes && !(readable && wire.Identifies(name)) && (!readable || !slices.Contains(identity[:], name)) {
				delete(headers, name)
			}
		}
	},
	func(headers amqp.Table) { delete(headers, wire.HeaderHistory) },
	func(headers amqp.Table) { delete(headers, wire.HeaderError) },
	func(headers amqp.Table) { // what is left of the sender's is still too much, and a copy without it is better than none
		for name := range headers {
			if !wire.Own(name) && name != wire.HeaderRoutes {
				delete(headers, name)
			}
		}
	},
}

// revive removes from the headers what a dead letter, or any failure, has left there.
func revive(headers amqp.Table, replays int) {
	for name := range headers {
		if wire.Own(name) && !ofSender(name) {
			delete(headers, name)
		}
	}
	headers[wire.HeaderReplays] = strconv.Itoa(replays)
}

// ofSender reports whether a header of ours says something of the message, and not of its failures.
func ofSender(name string) bool {
	return name == wire.HeaderKey || name == wire.HeaderOriginExchange || name == wire.HeaderOriginKey
}

// setWait records what remains of a delay that no delay queue is long enough for.
func setWait(p amqp.Publishing, rest time.Duration) {
	if rest <= 0 {
		delete(p.Headers, wire.HeaderWait)
		return
	}
	p.Headers[wire.HeaderWait] = strconv.FormatInt(rest.Milliseconds(), 10)
}

// deadCopy is a message with why it was given up.
func deadCopy(d amqp.Delivery, dead inbox.DeadLetter) amqp.Publishing {
	p := duplicate(d)
	delete(p.Headers, wire.HeaderWait)
	delete(p.Headers, wire.HeaderPutOff)
	p.Headers[wire.HeaderAttempt] = strconv.Itoa(dead.Attempts)
	if dead.Message.Replays > 0 {
		p.Headers[wire.HeaderReplays] = strconv.Itoa(dead.Message.Replays)
	}
	p.Headers[wire.HeaderClass] = dead.Class
	p.Headers[wire.HeaderError] = dead.Error
	set(p.Headers, wire.HeaderErrorType, dead.ErrorType, dead.ErrorType != "")
	set(p.Headers, wire.HeaderSQLState, dead.SQLState, dead.SQLState != "")
	set(p.Headers, wire.HeaderFingerprint, dead.Fingerprint, dead.Fingerprint != "")
	history := driver.EncodeHistory(dead.Message.History)
	set(p.Headers, wire.HeaderHistory, history, history != "")
	p.Headers[wire.HeaderFirstFailed] = timeText(dead.FirstFailedAt)
	p.Headers[wire.HeaderLastFailed] = timeText(dead.FailedAt)
	p.Headers[wire.HeaderConsumer] = dead.Consumer
	p.Headers[wire.HeaderOrigin] = dead.Message.Queue
	return p
}

// replayCopy is a dead letter as a message that was never tried.
func replayCopy(d amqp.Delivery) amqp.Publishing {
	p := duplicate(d)
	revive(p.Headers, max(intHeader(d, wire.HeaderReplays), 0)+1)
	return p
}

// readDead reads back what deadCopy wrote.
func readDead(d amqp.Delivery, class string, by *wire.Symfony) inbox.DeadLetter {
	m := convert(d, header(d, wire.HeaderOrigin), by)
	if named := header(d, wire.HeaderClass); named != "" {
		class = named
	}
	return inbox.DeadLetter{
		Message:       *m,
		Class:         class,
		Attempts:      m.Attempt,
		FirstFailedAt: m.FirstFailedAt,
		FailedAt:      timeHeader(d, wire.HeaderLastFailed),
		Error:         header(d, wire.HeaderError),
		ErrorType:     header(d, wire.HeaderErrorType),
		SQLState:      header(d, wire.HeaderSQLState),
		Fingerprint:   header(d, wire.HeaderFingerprint),
		Consumer:      header(d, wire.HeaderConsumer),
	}
}

func timeText(t time.Time) string { return t.UTC().Format(time.RFC3339Nano) }
