package amqpconn

import (
	"cmp"
	"errors"
	"fmt"
	"strings"

	amqp "github.com/rabbitmq/amqp091-go"
)

// The broker refuses a message by closing its channel, or the whole connection. It says why in a
// text, and the text may name the message's exchange, its topic or its size.

// refused returns the broker's reply if it closed a channel or a connection over something that it
// was sent. A fault of the way there, a shutdown and an operator close connections too.
func refused(err error) (*amqp.Error, bool) {
	reply, ok := errors.AsType[*amqp.Error](err)
	return reply, ok && reply != nil && reply.Server && reply.Code != amqp.ConnectionForced
}

// beforeSubject is what stands before the words that name something, in any release of RabbitMQ.
var beforeSubject = [...]string{"no ", "cannot publish to internal ", "access to ", "write access to "}

// named returns the words by which a reply names a message, "" if it does not. A reply may contain
// the words of several messages, for names may contain anything: the longest are those it means.
func named(reply *amqp.Error, out Out) string {
	_, subject, _ := strings.Cut(reply.Reason, " - ")
	for _, words := range beforeSubject {
		subject = strings.TrimPrefix(subject, words)
	}
	for _, words := range namesOf(reply.Code, out) {
		if strings.HasPrefix(subject, words) {
			return words
		}
	}
	return ""
}

// namesOf returns how a reply with that code would name a message.
func namesOf(code int, out Out) []string {
	switch code {
	case amqp.NotFound, amqp.AccessRefused:
		return []string{topicName(out), exchangeName(out)}
	case amqp.PreconditionFailed:
		return []string{fmt.Sprintf("message size %d is larger", len(out.Message.Body))}
	default:
		return nil
	}
}

func exchangeName(out Out) string {
	return fmt.Sprintf("exchange '%s' in vhost '", cmp.Or(out.Exchange, "amq.default"))
}

func topicName(out Out) string { return fmt.Sprintf("topic '%s' in %s", out.Key, exchangeName(out)) }

// verdict decides about the messages of a channel that has ended.
type verdict struct {
	err   error       // why it has ended
	reply *amqp.Error // nil: not because the broker refused something
	sent  bool        // the broker had been sent a message
	words string      // that name whom to blame; "": nobody is named
}

// overMessage reports whether the broker has refused a message.
func (v verdict) overMessage() bool { return v.reply != nil && v.sent }

// judge reads the broker's reply, with the messages that it may mean.
func judge(err error, sent []*entry) verdict {
	v := verdict{err: err, sent: len(sent) > 0}
	reply, ok := refused(err)
	if !ok {
		return v
	}
	v.reply = reply
	for _, e := range sent {
		if words := named(reply, e.out); len(words) > len(v.words) {
			v.words = words
		}
	}
	return v
}

// of returns the failure of a message, or nil if it is to be published again. Where nobody is
// named, a message is to blame if nothing else was on its way.
func (v verdict) of(e *entry, alone bool) error {
	switch {
	case v.reply == nil:
		return unavailable(v.err)
	case !e.sent():
		return nil
	case v.words == "" && alone, v.words != "" && named(v.reply, e.out) == v.words:
		return fmt.Errorf("%w: %w", v.class(), v.err)
	}
	return nil
}

// class is what a refusal means for a message that is to blame.
func (v verdict) class() error {
	switch {
	case v.reply.Code == amqp.NotFound, v.reply.Code == amqp.AccessRefused:
		return ErrUnroutable
	case v.words != "": // its size
		return ErrInvalid
	default:
		return ErrNacked
	}
}
