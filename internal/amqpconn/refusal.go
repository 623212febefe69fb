package amqpconn

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/internal/isolate"
)

// The broker refuses a message by closing its channel, or the whole connection. It gives the reason as a text,
// which may name the message's exchange, its topic or its size.

// refused returns the broker's reply if it closed a channel or a connection because of something sent to it.
// Network faults, shutdowns and operators close connections too.
func refused(err error) (*amqp.Error, bool) {
	reply, ok := errors.AsType[*amqp.Error](err)
	return reply, ok && reply != nil && reply.Server && reply.Code != amqp.ConnectionForced
}

// beforeSubject lists the words before the name in a reply, for all releases of RabbitMQ.
var beforeSubject = [...]string{"no ", "cannot publish to internal ", "access to ", "write access to "}

// named returns the words with which a reply names a message, or "". A reply may contain the words of several
// messages, because names may contain anything; the longest words are the right ones.
func named(reply *amqp.Error, out Out) string {
	_, subject, _ := strings.Cut(reply.Reason, " - ")
	for _, words := range beforeSubject {
		subject = strings.TrimPrefix(subject, words)
	}
	longest := ""
	for _, words := range namesOf(reply.Code, out) {
		if len(words) > len(longest) && strings.HasPrefix(subject, words) {
			longest = words
		}
	}
	return longest
}

// namesOf returns the words with which a reply with this code would name a message.
func namesOf(code int, out Out) []string {
	switch code {
	case amqp.NotFound, amqp.AccessRefused:
		names := []string{exchangeName(out)}
		for _, key := range keysOf(out) {
			names = append(names, topicName(out, key))
		}
		return names
	case amqp.PreconditionFailed:
		return []string{fmt.Sprintf("message size %d is larger", len(out.Message.Body))}
	default:
		return nil
	}
}

func exchangeName(out Out) string {
	return fmt.Sprintf("exchange '%s' in vhost '", cmp.Or(out.Exchange, "amq.default"))
}

func topicName(out Out, key string) string {
	return fmt.Sprintf("topic '%s' in %s", key, exchangeName(out))
}

// keysOf returns all routing keys of a message. RabbitMQ 4 checks the topic permissions of each.
func keysOf(out Out) []string {
	keys := []string{out.Key}
	for _, name := range further {
		list, _ := out.Message.Headers[name].([]any)
		for _, item := range list {
			if key, ok := item.(string); ok {
				keys = append(keys, key)
			}
		}
	}
	return keys
}

// verdict decides about the messages of a channel that has ended.
type verdict struct {
	err   error       // why it has ended
	reply *amqp.Error // nil: the broker refused nothing
	sent  bool        // the broker had been sent a message
	words string      // that name the message at fault; "": none is named
}

// overMessage reports whether the broker has refused a message.
func (v verdict) overMessage() bool { return v.reply != nil && v.sent }

// judge reads the broker's reply, given the messages that it may mean.
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

// of returns the failure of a message, or nil if it must be published again. If the reply names no message, a
// message is at fault if nothing else was in flight.
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

// class returns the error for a message at fault.
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

// maxSuspects bounds the number of suspects, because messages that are never published again are never cleared.
const maxSuspects = 10_000

// suspects are messages for one of which the broker closed a channel or a connection without naming it. Each is
// then published alone until it has its own answer. So the one at fault is found, and does not fail the others
// forever.
type suspects struct {
	turn chan struct{} // has room for the one that collects all places

	mu     sync.RWMutex
	search *isolate.Search[string] // by id; messages without an id are not recognized again
}

func newSuspects() *suspects {
	search := isolate.New[string](isolate.Singles)
	search.Most = maxSuspects
	return &suspects{turn: make(chan struct{}, 1), search: search}
}

func (s *suspects) has(out Out) bool {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.search.Has(out.Message.MessageId)
}

func (s *suspects) add(entries []*entry) {
	var ids []string
	for _, e := range entries {
		if id := e.out.Message.MessageId; id != "" {
			ids = append(ids, id)
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.search.Failed(ids...)
}

func (s *suspects) clear(out Out) {
	if !s.has(out) {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.search.Clear(out.Message.MessageId)
}

const (
	// missingFor is how long a missing exchange is not asked for again.
	missingFor = time.Second
	// refusedFor is how long a refused destination is not tried again.
	refusedFor = 5 * time.Second
	// maxFacts bounds the number of remembered exchanges and destinations.
	maxFacts = 1000
	// maxQuestions bounds the number of requests that wait for their replies.
	maxQuestions = 8
)

// facts caches a session's knowledge about its broker, each fact for as long as it probably holds. A refused
// message costs a channel and everything in flight on it, so a message that would be refused is not sent.
type facts struct {
	conn   *Conn
	asking sync.WaitGroup
	turns  chan struct{}

	mu        sync.RWMutex
	over      bool // no more requests
	exchanges map[string]*exchange
	refusals  map[destination]refusal
	maxBody   int // the broker's limit; 0: unknown
}

// destination is an exchange with a routing key, or a whole exchange.
type destination struct {
	exchange, key string
	whole         bool
}

type refusal struct {
	err   error
	until time.Time
}

// exchange is the reply to whether an exchange exists.
type exchange struct {
	asked chan struct{} // closed with the reply
	err   error         // nil: it exists
	until time.Time     // end of the error's validity
}

func newFacts(conn *Conn) *facts {
	return &facts{
		conn: conn, turns: make(chan struct{}, maxQuestions),
		exchanges: map[string]*exchange{}, refusals: map[destination]refusal{},
	}
}

// close waits for the replies to open requests. The connection has ended.
func (f *facts) close() {
	f.mu.Lock()
	f.over = true
	f.mu.Unlock()
	f.asking.Wait()
}

// check returns why a message would be refused. It may ask the broker about its exchange.
func (f *facts) check(ctx context.Context, out Out) error {
	if limit := f.conn.raw.Config.FrameSize; limit > 0 && limit < maxProperties && propertiesSize(out.Message) > limit {
		return fmt.Errorf("%w: headers do not fit in a frame of %d bytes", ErrInvalid, limit)
	}
	f.mu.RLock()
	err := f.known(out)
	x := f.exchanges[out.Exchange]
	f.mu.RUnlock()
	if err != nil || out.Exchange == "" {
		return err
	}
	return f.wait(ctx, out.Exchange, x)
}

// known returns why a message would be refused, without a request; f.mu is held.
func (f *facts) known(out Out) error {
	if f.maxBody > 0 && len(out.Message.Body) > f.maxBody {
		return fmt.Errorf("%w: body of %d bytes, the broker accepts at most %d", ErrInvalid, len(out.Message.Body), f.maxBody)
	}
	if len(f.refusals) == 0 {
		return nil
	}
	places := []destination{{exchange: out.Exchange, whole: true}}
	for _, key := range keysOf(out) {
		places = append(places, destination{exchange: out.Exchange, key: key})
	}
	for _, d := range places {
		if r, ok := f.refusals[d]; ok && time.Now().Before(r.until) {
			return r.err
		}
	}
	return nil
}

// learn records why the broker refused a message.
func (f *facts) learn(v verdict, out Out, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	switch v.reply.Code {
	case amqp.NotFound:
		delete(f.exchanges, out.Exchange) // it existed
	case amqp.AccessRefused:
		d, ok := closedTo(v, out)
		if !ok {
			return
		}
		if len(f.refusals) >= maxFacts {
			clear(f.refusals)
		}
		f.refusals[d] = refusal{err, time.Now().Add(refusedFor)}
	case amqp.PreconditionFailed:
		var size, limit int
		_, text, _ := strings.Cut(v.reply.Reason, "message size ")
		text = strings.ReplaceAll(text, "configured ", "")
		if n, _ := fmt.Sscanf(text, "%d is larger than max size %d", &size, &limit); n == 2 {
			f.maxBody = limit
		}
	}
}

// closedTo returns the destination that a reply refuses. It returns false for a message of several routing keys
// if the reply names none of them.
func closedTo(v verdict, out Out) (destination, bool) {
	if v.words == exchangeName(out) {
		return destination{exchange: out.Exchange, whole: true}, true
	}
	keys := keysOf(out)
	for _, key := range keys {
		if len(keys) == 1 || v.words == topicName(out, key) {
			return destination{exchange: out.Exchange, key: key}, true
		}
	}
	return destination{}, false
}

// wait returns nil if the exchange exists. It asks the broker if x, the cached reply, is nil or too old.
func (f *facts) wait(ctx context.Context, name string, x *exchange) error {
	if x == nil || x.outdated() {
		if reason, isBlocked := f.conn.Blocked(); isBlocked {
			return blocked(reason) // the request would not be answered
		}
		x = f.ask(name)
	}
	select {
	case <-x.asked:
		return x.err
	default:
	}
	select {
	case <-x.asked:
		return x.err
	case <-f.conn.Done():
		return unavailable(f.conn.Err())
	case <-ctx.Done():
		return unavailable(ctx.Err())
	}
}

func (x *exchange) outdated() bool {
	select {
	case <-x.asked:
		return x.err != nil && time.Now().After(x.until)
	default:
		return false
	}
}

// ask sends the request, unless another caller has sent it.
func (f *facts) ask(name string) *exchange {
	f.mu.Lock()
	defer f.mu.Unlock()
	if x := f.exchanges[name]; x != nil && !x.outdated() {
		return x
	}
	if len(f.exchanges) >= maxFacts {
		clear(f.exchanges)
	}
	x := &exchange{asked: make(chan struct{})}
	f.exchanges[name] = x
	if f.over {
		x.err = unavailable(amqp.ErrClosed)
		close(x.asked)
		return x
	}
	f.asking.Go(func() { f.answer(name, x) })
	return x
}

func (f *facts) answer(name string, x *exchange) {
	defer close(x.asked)
	f.turns <- struct{}{}
	defer func() { <-f.turns }()
	exists, err := f.conn.ExchangeExists(name)
	_, mayNotAsk := refused(err)
	switch {
	case mayNotAsk: // it may still be allowed to publish
	case err != nil:
		x.err = unavailable(err)
	case !exists:
		x.err = fmt.Errorf("%w: exchange %q does not exist", ErrUnroutable, name)
		x.until = time.Now().Add(missingFor)
	}
}
