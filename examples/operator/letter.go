package operator

import (
	"context"
	"encoding/base64"
	"errors"
	"slices"
	"time"
	"unicode/utf8"

	"github.com/google/uuid"
)

// letter is a dead letter, of an outbox or of a consumer, or a message that an outbox holds. Its JSON is
// what --json prints.
type letter struct {
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

// mapped is all in another form; empty, and not nil, where there is nothing.
func mapped[A, B any](all []A, to func(A) B) []B {
	others := make([]B, len(all))
	for i, one := range all {
		others[i] = to(one)
	}
	return others
}

// fill adds what is shown of a letter alone.
func (l *letter) fill(headers map[string]string, body []byte) {
	l.Headers = headers
	if utf8.Valid(body) {
		l.Body = string(body)
	} else {
		l.BodyBase64 = base64.StdEncoding.EncodeToString(body)
	}
}

// bytes is the body that fill was given.
func (l *letter) bytes() []byte {
	if l.BodyBase64 == "" {
		return []byte(l.Body)
	}
	body, _ := base64.StdEncoding.DecodeString(l.BodyBase64) // of fill
	return body
}

// hiddenByService is told in place of a body that a mask hides.
const hiddenByService = "hidden by the service"

// masked is what may be seen of the body. Nil: nothing, though there is one.
func (l *letter) masked(mask func(MaskedMessage) []byte) []byte {
	body := l.bytes()
	if mask == nil || len(body) == 0 {
		return body
	}
	return mask(MaskedMessage{l.From, l.Name, l.ContentType, slices.Clone(body)})
}

// failure is one failed attempt before the last.
type failure struct {
	At       time.Time `json:"at"`
	Consumer string    `json:"consumer"`
	Error    string    `json:"error"`
}

// group are dead letters of one kind.
type group struct {
	From   string    `json:"from"`
	ID     string    `json:"group"`
	Count  int       `json:"count"`
	First  time.Time `json:"first"`
	Last   time.Time `json:"last"`
	Sample letter    `json:"sample"`
	// Part says that there may be more of them, and of other kinds: another session holds a part of the place's.
	Part bool `json:"part,omitempty"`
}

// selection chooses dead letters: those that match all that is set.
type selection struct {
	IDs           []uuid.UUID
	Name, Key     string
	Class, Group  string
	ErrorContains string
	After, Before time.Time
	Limit         int
	// Behind is the Cursor of a letter of an outbox, behind which a list begins. Only a list has it.
	Behind string
}

// change is who changes dead letters, and how.
type change struct {
	By, Reason string
	PerSecond  float64
	DryRun     bool
	Force      bool
	// Edit returns the body that a message gets which is tried again. Optional.
	Edit func(MaskedMessage) ([]byte, error)
	// Progress learns how many are done, those that are too old left out. Optional.
	Progress func(done int)
}

// validate refuses what the log could not keep.
func (c change) validate() error {
	switch {
	case len(c.By) > 128 || plain(c.By) != c.By:
		return errors.New("by must be at most 128 bytes without control characters")
	case len(c.Reason) > 1000 || plain(c.Reason) != c.Reason:
		return errors.New("reason must be at most 1,000 bytes without control characters")
	case !(c.PerSecond >= 0):
		return errors.New("rate must not be negative")
	}
	return nil
}

// replayed is what became of letters that were to be tried again.
type replayed struct{ Returned, Outlived, Failed int }

// shelf is where dead letters are: an outbox or a consumer.
type shelf interface {
	// list leaves bodies and headers out unless they are wanted whole.
	list(ctx context.Context, s selection, whole bool) ([]letter, error)
	count(ctx context.Context, s selection) (int, error)
	groups(ctx context.Context, s selection) ([]group, error)
	replay(ctx context.Context, s selection, c change) (replayed, error)
	remove(ctx context.Context, s selection, c change) (int, error)
	// keepsLog says that the place itself keeps who has changed what.
	keepsLog() bool
}

// place is a shelf and its name.
type place struct {
	name string
	kind string // "outbox" or "inbox"
	shelf
}

// The kinds of places.
const (
	kindOutbox = "outbox"
	kindInbox  = "inbox"
)

// places are all of them, those of outboxes first.
func (o *Operator) places() []place {
	var all []place
	for _, b := range o.cfg.Outboxes {
		_, audits := b.Store.(auditor)
		all = append(all, place{b.Name, kindOutbox, outboxShelf{b.Name, b.Store.DeadLetters(), audits}})
	}
	for _, c := range o.cfg.Consumers {
		all = append(all, place{c.Name, kindInbox, inboxShelf{c.Name, inTurns{c.Consumer.DeadLetters(), o.turns[c.Name]}}})
	}
	return all
}
