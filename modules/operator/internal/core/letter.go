package core

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"slices"
	"time"
	"unicode/utf8"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/modules/operator"
)

// Letter is a dead letter, of an outbox or of a consumer, or a message that an outbox holds. Its JSON is
// what --json prints.
type Letter struct {
	From        string            `json:"from"`
	ID          uuid.UUID         `json:"id"`
	Name        string            `json:"name"`
	Key         string            `json:"key,omitempty"`
	Class       string            `json:"class,omitempty"`
	Error       string            `json:"error,omitempty"`
	ErrorType   string            `json:"error_type,omitempty"`
	SQLState    string            `json:"sqlstate,omitempty"`
	Fingerprint string            `json:"group,omitempty"`
	Attempts    int               `json:"attempts"`
	Replays     int               `json:"replays,omitempty"`
	Queue       string            `json:"queue,omitempty"`
	Consumer    string            `json:"consumer,omitempty"`
	Transport   string            `json:"transport,omitempty"`
	Exchange    string            `json:"exchange,omitempty"`
	RoutingKey  string            `json:"routing_key,omitempty"`
	CreatedAt   time.Time         `json:"created_at,omitzero"`
	FirstFailed time.Time         `json:"first_failed_at,omitzero"`
	FailedAt    time.Time         `json:"failed_at,omitzero"`
	DueAt       time.Time         `json:"due_at,omitzero"` // of one that waits for its next attempt
	History     []failure         `json:"history,omitempty"`
	Headers     map[string]string `json:"headers,omitempty"`
	ContentType string            `json:"content_type,omitempty"`
	Body        string            `json:"body,omitempty"`
	BodyBase64  string            `json:"body_base64,omitempty"` // of a body that is no text
	// Part says of a list that another session holds others of the same place.
	Part bool `json:"part,omitempty"`
	// Unreadable says why the message is not complete.
	Unreadable string `json:"unreadable,omitempty"`
	// Cursor is where the list of an outbox goes on behind it.
	Cursor string `json:"cursor,omitempty"`
}

// told is a time as JSON can tell it: another program may have written one that is beyond the year 9999, such as milliseconds
// in place of seconds, and one such letter would hide all others.
func told(at time.Time) time.Time {
	if year := at.UTC().Year(); year < 0 || year > 9999 {
		return time.Time{}
	}
	return at
}

// Mapped is all in another form; empty, and not nil, where there is nothing.
func Mapped[A, B any](all []A, to func(A) B) []B {
	others := make([]B, len(all))
	for i, one := range all {
		others[i] = to(one)
	}
	return others
}

// Fill adds what is shown of a letter alone.
func (l *Letter) Fill(headers map[string]string, body []byte) {
	l.Headers = headers
	if utf8.Valid(body) {
		l.Body = string(body)
	} else {
		l.BodyBase64 = base64.StdEncoding.EncodeToString(body)
	}
}

// Bytes is the body that fill was given.
func (l *Letter) Bytes() []byte {
	if l.BodyBase64 == "" {
		return []byte(l.Body)
	}
	body, _ := base64.StdEncoding.DecodeString(l.BodyBase64) // of fill
	return body
}

// HiddenByService is told in place of a body that a mask hides.
const HiddenByService = "hidden by the service"

// Masked is what may be seen of the body. Nil: nothing, though there is one.
func (l *Letter) Masked(mask func(operator.MaskedMessage) []byte) []byte {
	body := l.Bytes()
	if mask == nil || len(body) == 0 {
		return body
	}
	return mask(operator.MaskedMessage{From: l.From, Name: l.Name, ContentType: l.ContentType, Body: slices.Clone(body)})
}

// failure is one failed attempt before the last.
type failure struct {
	At       time.Time `json:"at"`
	Consumer string    `json:"consumer"`
	Error    string    `json:"error"`
}

// Group are dead letters of one kind.
type Group struct {
	From   string    `json:"from"`
	ID     string    `json:"group"`
	Count  int       `json:"count"`
	First  time.Time `json:"first"`
	Last   time.Time `json:"last"`
	Sample Letter    `json:"sample"`
	// Part says that there may be more of them, and of other kinds: another session holds a part of the place's.
	Part bool `json:"part,omitempty"`
}

// shelf is where dead letters are: an outbox or a consumer.
type shelf interface {
	// List leaves bodies and headers out unless they are wanted whole.
	List(ctx context.Context, s Selection, whole bool) ([]Letter, error)
	Count(ctx context.Context, s Selection) (int, error)
	Groups(ctx context.Context, s Selection) ([]Group, error)
	replay(ctx context.Context, s Selection, c Change) (Replayed, error)
	remove(ctx context.Context, s Selection, c Change) (int, error)
	// keepsLog says that the place itself keeps who has changed what.
	keepsLog() bool
}

// Place is a shelf and its name.
type Place struct {
	Name string
	Kind string // "outbox" or "inbox"
	shelf
}

// The kinds of places.
const (
	KindOutbox = "outbox"
	KindInbox  = "inbox"
)

// places are all of them, those of outboxes first.
func (o *Operator) places() []Place {
	var all []Place
	for _, b := range o.Config.Outboxes {
		_, audits := b.Store.(auditor)
		all = append(all, Place{b.Name, KindOutbox, outboxShelf{b.Name, b.Store.DeadLetters(), audits}})
	}
	for _, c := range o.Config.Consumers {
		all = append(all, Place{c.Name, KindInbox, inboxShelf{c.Name, inTurns{c.Consumer.DeadLetters(), o.turns[c.Name]}}})
	}
	return all
}

// EachPlace gathers what the places have. One that cannot be asked does not keep the others from telling.
func EachPlace[T any](ctx context.Context, places []Place, ask func(context.Context, Place) ([]T, error)) ([]T, error) {
	all := []T{} // not null in JSON
	var failed []error
	for _, p := range places {
		found, err := ask(ctx, p)
		all = append(all, found...)
		if err != nil {
			failed = append(failed, fmt.Errorf("%s: %w", p.Name, err))
		}
	}
	return all, errors.Join(failed...)
}

// PlaceNames are those of a kind, or all.
func (o *Operator) PlaceNames(kind string) []string {
	var names []string
	for _, p := range o.places() {
		if kind == "" || p.Kind == kind {
			names = append(names, p.Name)
		}
	}
	return names
}

// TraceID is that of a W3C traceparent: https://www.w3.org/TR/trace-context/#traceparent-header.
func TraceID(traceparent string) string {
	const from, to = len("00-"), len("00-") + 32
	if len(traceparent) < to {
		return ""
	}
	return traceparent[from:to]
}

// MaxPerPage is how many letters one page lists at most.
const MaxPerPage = 1000

// Listed is how many letters are listed where nothing else is asked for.
const Listed = 100

// Chosen are the places of these names, each once, or all: those of one kind, where only they can
// do what is asked. A place that has the name of a kind is meant before the kind.
func (o *Operator) Chosen(names []string, kind string) ([]Place, error) {
	all := slices.DeleteFunc(o.places(), func(p Place) bool { return kind != "" && p.Kind != kind })
	if len(names) == 0 {
		return all, nil
	}
	wanted := map[string]bool{}
	for _, name := range names {
		named := func(p Place) bool { return p.Name == name }
		if !slices.ContainsFunc(all, named) {
			named = func(p Place) bool { return p.Kind == name }
		}
		found := false
		for _, p := range all {
			if named(p) {
				wanted[p.Name], found = true, true
			}
		}
		if !found {
			return nil, Mistakef("--from: there is no %.40q here", name)
		}
	}
	return slices.DeleteFunc(all, func(p Place) bool { return !wanted[p.Name] }), nil
}
