package core

import (
	"cmp"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/inbox"
	pgxdriver "github.com/holdfast-go/holdfast/inbox/inboxpgx/driver"
	"github.com/holdfast-go/holdfast/internal/deadletter"
	"github.com/holdfast-go/holdfast/modules/operator"
	"github.com/holdfast-go/holdfast/outbox"
)

type (
	// Filter selects dead letters.
	Filter = deadletter.Filter
	// Change is a change of dead letters, with its author. Edit gets messages that the service may mask.
	Change = deadletter.Replay[operator.MaskedMessage]
	// Replayed counts the results of a change. After a drop, Returned is the number of removed ones.
	Replayed = deadletter.Replayed
)

// Message is a dead letter, of an outbox or of a consumer, or a message that an outbox holds. Its JSON is
// what --json prints.
type Message struct {
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
	DueAt       time.Time         `json:"due_at,omitzero"` // of a message that waits for its next attempt
	History     []failure         `json:"history,omitempty"`
	Headers     map[string]string `json:"headers,omitempty"`
	ContentType string            `json:"content_type,omitempty"`
	Body        string            `json:"body,omitempty"`
	BodyBase64  string            `json:"body_base64,omitempty"` // of a body that is no text
	// Part is true if another session holds more messages of the same place.
	Part bool `json:"part,omitempty"`
	// Unreadable is the reason why the message is not complete.
	Unreadable string `json:"unreadable,omitempty"`
	// Cursor continues the list of an outbox after this message.
	Cursor string `json:"cursor,omitempty"`
}

// failure is one failed attempt before the last one.
type failure struct {
	At       time.Time `json:"at"`
	Consumer string    `json:"consumer"`
	Error    string    `json:"error"`
}

// jsonTime returns at, or zero if JSON cannot express it. Another program may have written a time beyond the year 9999, such as
// milliseconds instead of seconds, and one such message would hide all others.
func jsonTime(at time.Time) time.Time {
	if year := at.UTC().Year(); year < 0 || year > 9999 {
		return time.Time{}
	}
	return at
}

// Mapped returns to of each element. It is empty, and not nil, if there are none.
func Mapped[A, B any](all []A, to func(A) B) []B {
	others := make([]B, len(all))
	for i, one := range all {
		others[i] = to(one)
	}
	return others
}

// Fill sets the headers and the body.
func (m *Message) Fill(headers map[string]string, body []byte) {
	m.Headers = headers
	if utf8.Valid(body) {
		m.Body = string(body)
	} else {
		m.BodyBase64 = base64.StdEncoding.EncodeToString(body)
	}
}

// Bytes returns the body that was passed to Fill.
func (m *Message) Bytes() []byte {
	if m.BodyBase64 == "" {
		return []byte(m.Body)
	}
	body, _ := base64.StdEncoding.DecodeString(m.BodyBase64) // Fill has encoded it
	return body
}

// HiddenByService is shown instead of a body that a mask hides.
const HiddenByService = "hidden by the service"

// Masked returns the part of the body that may be seen. Nil: the body is hidden.
func (m *Message) Masked(mask func(operator.MaskedMessage) []byte) []byte {
	body := m.Bytes()
	if mask == nil || len(body) == 0 {
		return body
	}
	return mask(operator.MaskedMessage{From: m.From, Name: m.Name, ContentType: m.ContentType, Body: slices.Clone(body)})
}

// traceparent matches a W3C traceparent: https://www.w3.org/TR/trace-context/#traceparent-header.
var traceparent = regexp.MustCompile(`^[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}`)

// TraceID returns the trace id of the message's traceparent; "": it has none, or no valid one.
func (m *Message) TraceID() string {
	found := traceparent.FindStringSubmatch(m.Headers["traceparent"])
	if found == nil || strings.Trim(found[1], "0") == "" {
		return ""
	}
	return found[1]
}

// Group are dead letters of one kind.
type Group struct {
	From   string    `json:"from"`
	ID     string    `json:"group"`
	Count  int       `json:"count"`
	First  time.Time `json:"first"`
	Last   time.Time `json:"last"`
	Sample Message   `json:"sample"`
	// Part is true if another session holds more dead letters of the place: of this kind, or of others.
	Part bool `json:"part,omitempty"`
}

// Place is an outbox or a consumer, and its dead letters or its messages that wait for an attempt.
type Place struct {
	Name     string
	Kind     string // "outbox" or "inbox"
	Retrying bool   // the messages wait for an attempt
	source
}

// The kinds of places.
const (
	KindOutbox = "outbox"
	KindInbox  = "inbox"
)

// source has the dead letters of a place.
type source interface {
	// List leaves out bodies and headers unless whole is true.
	List(ctx context.Context, f Filter, whole bool) ([]Message, error)
	Count(ctx context.Context, f Filter) (int, error)
	Groups(ctx context.Context, f Filter) ([]Group, error)
	// ListSoFar and GroupsSoFar are List and Groups. While they read a consumer, they call soFar with the results up to then.
	ListSoFar(ctx context.Context, f Filter, soFar func([]Message)) ([]Message, error)
	GroupsSoFar(ctx context.Context, f Filter, soFar func([]Group)) ([]Group, error)
	replay(ctx context.Context, f Filter, c Change) (Replayed, error)
	remove(ctx context.Context, f Filter, c Change) (int, error)
	// keepsLog reports whether the place itself records its changes and their authors.
	keepsLog() bool
}

// turn lets one at a time read or change the dead letters of a consumer. RabbitMQ delivers each message once: of two at the same
// time, each would see a part. A change ends the running read, and no other starts until the change has ended.
type turn struct {
	taken chan struct{} // capacity 1
	mu    sync.Mutex
	// changes is the number of changes that run or wait.
	changes int
	end     context.CancelCauseFunc // cancels the last read
}

func newTurn() *turn { return &turn{taken: make(chan struct{}, 1), end: func(error) {}} }

// errChanged is the error of a read beside a change.
var errChanged = errors.New("these messages are being changed: read them when the change has ended")

// read calls do while nobody else reads or changes.
func (t *turn) read(ctx context.Context, do func(context.Context) error) error {
	if t.changing() {
		return errChanged
	}
	select {
	case t.taken <- struct{}{}:
		defer func() { <-t.taken }()
	case <-ctx.Done():
		return fmt.Errorf("others are reading these messages: %w", ctx.Err())
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	if !t.begin(cancel) {
		return errChanged
	}
	err := do(ctx)
	if err != nil && errors.Is(context.Cause(ctx), errChanged) {
		return errChanged
	}
	return err
}

func (t *turn) changing() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.changes > 0
}

// begin begins a read that end cancels, unless a change waits.
func (t *turn) begin(end context.CancelCauseFunc) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.changes > 0 {
		return false
	}
	t.end = end
	return true
}

// change calls do when the running read and the changes before it have ended.
func (t *turn) change(ctx context.Context, do func() error) error {
	t.count(1)
	defer t.count(-1)
	select {
	case t.taken <- struct{}{}:
		defer func() { <-t.taken }()
	case <-ctx.Done():
		return fmt.Errorf("others are changing these messages: %w", ctx.Err())
	}
	return do()
}

// count adds to the number of changes, and ends the running read.
func (t *turn) count(n int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.changes += n
	t.end(errChanged)
}

// deadLetters is the source of a place whose messages are of type M.
type deadLetters[M any] struct {
	name   string
	kept   deadletter.DeadLetters[M]
	audits bool
	turn   *turn // nil: any number may read at the same time
	// shown returns a message without headers and body, then its headers and body.
	shown func(M) (m Message, headers map[string]string, body []byte)
}

func ofOutbox(m outbox.Message) (Message, map[string]string, []byte) {
	return Message{
		ID: m.ID, Name: m.Name, Key: m.Key, Transport: m.Transport, Exchange: m.Route.Exchange, RoutingKey: m.Route.RoutingKey,
		ContentType: m.ContentType,
	}, m.Headers, m.Body
}

func ofConsumer(m inbox.Message) (Message, map[string]string, []byte) {
	shown := Message{ID: m.ID, Name: m.Name, Key: m.Key, Replays: m.Replays, Queue: m.Queue, CreatedAt: jsonTime(m.PublishedAt), ContentType: m.ContentType}
	for _, a := range m.History {
		shown.History = append(shown.History, failure{jsonTime(a.At), a.Consumer, a.Error})
	}
	return shown, m.Headers, m.Body
}

func (l deadLetters[M]) keepsLog() bool { return l.audits }

func (l deadLetters[M]) show(d deadletter.DeadLetter[M], whole bool) Message {
	m, headers, body := l.shown(d.Message)
	m.From, m.Class, m.Error, m.ErrorType, m.SQLState, m.Fingerprint = l.name, d.Class, d.Error, d.ErrorType, d.SQLState, d.Fingerprint
	m.Attempts, m.Consumer, m.Cursor, m.Unreadable = d.Attempts, d.Consumer, d.Cursor, TextOf(d.Unreadable)
	m.FirstFailed, m.FailedAt, m.DueAt = jsonTime(d.FirstFailedAt), jsonTime(d.FailedAt), jsonTime(d.DueAt)
	if !d.CreatedAt.IsZero() {
		m.CreatedAt = jsonTime(d.CreatedAt)
	}
	switch {
	case whole && d.Omitted:
		m.Unreadable = "left out: the messages before it are too large together"
	case whole:
		m.Fill(headers, body)
	}
	return m
}

// inTurn reads in turn.
func (l deadLetters[M]) inTurn(ctx context.Context, do func(context.Context) error) error {
	if l.turn == nil {
		return do(ctx)
	}
	return l.turn.read(ctx, do)
}

// look is inTurn, and reports whether only a part was seen. In that case the error is ErrPart.
func (l deadLetters[M]) look(ctx context.Context, do func(context.Context) error) (part bool, err error) {
	if err = l.inTurn(ctx, do); errors.Is(err, inbox.ErrHeld) {
		return true, ErrPart
	}
	return false, err
}

// changing changes in turn, if a reader would hold messages that the change needs. Elsewhere a change that is paced, and takes
// hours, leaves the readers alone.
func (l deadLetters[M]) changing(ctx context.Context, do func() error) error {
	if held, ok := l.kept.(interface{ Exclusive() bool }); l.turn == nil || !ok || !held.Exclusive() {
		return do()
	}
	return l.turn.change(ctx, do)
}

// List implements source.
func (l deadLetters[M]) List(ctx context.Context, f Filter, whole bool) ([]Message, error) {
	f.Whole = whole
	var found []deadletter.DeadLetter[M]
	part, err := l.look(ctx, func(ctx context.Context) (err error) {
		found, err = l.kept.List(ctx, f)
		return err
	})
	return Mapped(found, func(d deadletter.DeadLetter[M]) Message {
		m := l.show(d, whole)
		m.Part = part
		return m
	}), err
}

// Count implements source.
func (l deadLetters[M]) Count(ctx context.Context, f Filter) (n int, err error) {
	_, err = l.look(ctx, func(ctx context.Context) (err error) {
		n, err = l.kept.Count(ctx, f)
		return err
	})
	return n, err
}

// Groups implements source.
func (l deadLetters[M]) Groups(ctx context.Context, f Filter) ([]Group, error) {
	var found []deadletter.Group[M]
	part, err := l.look(ctx, func(ctx context.Context) (err error) {
		found, err = l.kept.Groups(ctx, f)
		return err
	})
	return l.showGroups(found, part), err
}

func (l deadLetters[M]) showGroups(found []deadletter.Group[M], part bool) []Group {
	return Mapped(found, func(g deadletter.Group[M]) Group {
		return Group{l.name, g.Fingerprint, g.Count, jsonTime(g.First), jsonTime(g.Last), l.show(g.Sample, false), part}
	})
}

// reader is implemented by dead letters that are read one after the other.
type reader[M any] interface {
	Each(ctx context.Context, f Filter, see func(deadletter.DeadLetter[M])) error
}

// soFarEvery is the interval of partial results.
const soFarEvery = 100 * time.Millisecond

// each reads dead letters one after the other. It calls soFar now and then.
func (l deadLetters[M]) each(ctx context.Context, all reader[M], f Filter, see func(deadletter.DeadLetter[M]), soFar func()) (part bool, err error) {
	return l.look(ctx, func(ctx context.Context) error {
		last := time.Now()
		return all.Each(ctx, f, func(d deadletter.DeadLetter[M]) {
			see(d)
			if time.Since(last) >= soFarEvery {
				soFar()
				last = time.Now()
			}
		})
	})
}

// ListSoFar implements source.
func (l deadLetters[M]) ListSoFar(ctx context.Context, f Filter, soFar func([]Message)) ([]Message, error) {
	all, ok := l.kept.(reader[M])
	if !ok {
		return l.List(ctx, f, false)
	}
	found := []Message{}
	part, err := l.each(ctx, all, f, func(d deadletter.DeadLetter[M]) { found = append(found, l.show(d, false)) }, func() { soFar(slices.Clone(found)) })
	for i := range found {
		found[i].Part = part
	}
	return found, err
}

// GroupsSoFar implements source.
func (l deadLetters[M]) GroupsSoFar(ctx context.Context, f Filter, soFar func([]Group)) ([]Group, error) {
	all, ok := l.kept.(reader[M])
	if !ok {
		return l.Groups(ctx, f)
	}
	most := f.Limit
	f.Limit = 0 // it bounds the groups
	kinds := deadletter.Groups[M]{Most: deadletter.GroupsLimit}
	part, err := l.each(ctx, all, f, kinds.Add, func() { soFar(l.showGroups(kinds.Largest(most), false)) })
	return l.showGroups(kinds.Largest(most), part), err
}

func (l deadLetters[M]) replay(ctx context.Context, f Filter, c Change) (done Replayed, err error) {
	r := deadletter.Replay[M]{By: c.By, Reason: c.Reason, PerSecond: c.PerSecond, Delay: c.Delay, DryRun: c.DryRun, Force: c.Force, Progress: c.Progress}
	if c.Edit != nil {
		r.Edit = func(m M) ([]byte, error) {
			shown, _, body := l.shown(m)
			return c.Edit(operator.MaskedMessage{From: l.name, Name: shown.Name, ContentType: shown.ContentType, Body: body})
		}
	}
	do := func(ctx context.Context) (err error) {
		done, err = l.kept.Replay(ctx, f, r)
		return err
	}
	if c.DryRun {
		err = l.inTurn(ctx, do)
	} else {
		err = l.changing(ctx, func() error { return do(ctx) })
	}
	return done, err
}

func (l deadLetters[M]) remove(ctx context.Context, f Filter, c Change) (n int, err error) {
	r := deadletter.Removal{By: c.By, Reason: c.Reason}
	if c.Progress != nil {
		r.Progress = func(removed int) { c.Progress(Replayed{Returned: removed}) }
	}
	err = l.changing(ctx, func() (err error) {
		n, err = l.kept.Remove(ctx, f, r)
		return err
	})
	return n, err
}

// ErrPart means that RabbitMQ has delivered some of a consumer's dead letters to another session.
var ErrPart = errors.New("a part only: another session holds the rest")

// places returns all places, outboxes first.
func (o *Operator) places() []Place {
	var all []Place
	for _, b := range o.Config.Outboxes {
		_, audits := b.Store.(auditor)
		all = append(all, Place{b.Name, KindOutbox, false, deadLetters[outbox.Message]{b.Name, b.Store.DeadLetters(), audits, nil, ofOutbox}})
	}
	for _, c := range o.Config.Consumers {
		all = append(all, Place{c.Name, KindInbox, false, deadLetters[inbox.Message]{c.Name, c.Consumer.DeadLetters(), false, o.turns[c.Name], ofConsumer}})
	}
	return all
}

// EachPlace joins the results of ask for all places. It continues after a place that fails.
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

// EachPlaceSoFar is EachPlace, and calls soFar with the results up to then while ask does.
func EachPlaceSoFar[T any](ctx context.Context, places []Place, soFar func([]T), ask func(context.Context, Place, func([]T)) ([]T, error)) ([]T, error) {
	before := []T{}
	return EachPlace(ctx, places, func(ctx context.Context, p Place) ([]T, error) {
		found, err := ask(ctx, p, func(found []T) { soFar(slices.Concat(before, found)) })
		before = append(before, found...)
		return found, err
	})
}

// List returns the dead letters of several places.
func List(ctx context.Context, places []Place, f Filter, whole bool) ([]Message, error) {
	return EachPlace(ctx, places, func(ctx context.Context, p Place) ([]Message, error) { return p.List(ctx, f, whole) })
}

// Groups returns the groups of several places, the largest first.
func Groups(ctx context.Context, places []Place, f Filter) ([]Group, error) {
	all, err := EachPlace(ctx, places, func(ctx context.Context, p Place) ([]Group, error) { return p.Groups(ctx, f) })
	SortGroups(all)
	return all, err
}

// SortGroups sorts the largest group first.
func SortGroups(all []Group) {
	slices.SortStableFunc(all, func(a, b Group) int { return cmp.Compare(b.Count, a.Count) })
}

// PlaceNames returns the names of the places of a kind. Empty: all.
func (o *Operator) PlaceNames(kind string) []string {
	var names []string
	for _, p := range o.places() {
		if kind == "" || p.Kind == kind {
			names = append(names, p.Name)
		}
	}
	return names
}

// Chosen returns the places with these names, each once. No names stand for all places. kind, if not empty, limits them to
// one kind. A name may also be a kind, unless a place has that name.
func (o *Operator) Chosen(names []string, kind string) ([]Place, error) {
	return chosen(o.places(), names, kind)
}

func chosen(all []Place, names []string, kind string) ([]Place, error) {
	all = slices.DeleteFunc(all, func(p Place) bool { return kind != "" && p.Kind != kind })
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

const (
	// MaxPerPage bounds the messages on one page.
	MaxPerPage = 1000
	// Listed is the number of messages in a list by default.
	Listed = deadletter.ListLimit
)

// Typed are places and a filter of dead letters, as a person or an agent has typed them.
type Typed struct {
	From  []string `json:"from,omitempty" jsonschema:"only of these outboxes and consumers, by their names in status"`
	IDs   []string `json:"ids,omitempty" jsonschema:"only these messages, by their ids"`
	Name  string   `json:"name,omitempty" jsonschema:"only messages of this name"`
	Key   string   `json:"key,omitempty" jsonschema:"only messages of this ordering key"`
	Class string   `json:"class,omitempty" jsonschema:"only failures of this class"`
	Group string   `json:"group,omitempty" jsonschema:"only failures of this group, by its fingerprint in groups"`
	Error string   `json:"error,omitempty" jsonschema:"only failures with this text in the error"`
	Since string   `json:"since,omitempty" jsonschema:"only failures since then: 2h for two hours ago, or 2026-01-02T15:04:05Z"`
	Until string   `json:"until,omitempty" jsonschema:"only failures before then"`
	Limit int      `json:"limit,omitempty" jsonschema:"at most this many from each outbox and consumer; of an outbox the oldest"`
	// Retrying chooses messages that wait for an attempt instead of dead letters.
	Retrying bool `json:"retrying,omitempty" jsonschema:"messages that wait for their next attempt, instead of dead letters"`
}

// Choose parses t. kind limits the places to one kind. Empty: all.
func (o *Operator) Choose(t Typed, kind string) ([]Place, Filter, error) {
	f := Filter{Name: t.Name, Key: t.Key, Class: t.Class, Fingerprint: t.Group, ErrorContains: t.Error, Limit: t.Limit}
	for _, text := range t.IDs {
		id, err := uuid.Parse(text)
		if err != nil {
			return nil, f, Mistakef("%.40q is not an id", text)
		}
		f.IDs = append(f.IDs, id)
	}
	if f.Limit < 0 {
		return nil, f, Mistakef("--limit must not be negative")
	}
	var err error
	if f.FailedAfter, err = parseMoment(t.Since); err != nil {
		return nil, f, Mistakef("--since: %w", err)
	}
	if f.FailedBefore, err = parseMoment(t.Until); err != nil {
		return nil, f, Mistakef("--until: %w", err)
	}
	choose := o.Chosen
	if t.Retrying {
		choose = o.ChosenRetrying
	}
	places, err := choose(t.From, kind)
	return places, f, err
}

// parseMoment parses a time, or a duration before now.
func parseMoment(text string) (time.Time, error) {
	if text == "" {
		return time.Time{}, nil
	}
	if ago, err := time.ParseDuration(text); err == nil && ago >= 0 {
		return time.Now().Add(-ago), nil
	}
	at, err := time.Parse(time.RFC3339, text)
	if err != nil {
		return at, fmt.Errorf("%.40q is neither a duration such as 2h nor a time such as 2026-01-02T15:04:05Z", text)
	}
	return at, nil
}

// Flags formats a filter as flags.
func Flags(f Filter) string {
	var words []string
	add := func(flag, value string) {
		if value != "" {
			words = append(words, fmt.Sprintf("--%s=%s", flag, strconv.Quote(value)))
		}
	}
	if n := len(f.IDs); n > 3 {
		words = append(words, fmt.Sprintf("%d ids, the first %s", n, f.IDs[0]))
	} else {
		for _, id := range f.IDs {
			words = append(words, id.String())
		}
	}
	add("name", f.Name)
	add("key", f.Key)
	add("class", f.Class)
	add("group", f.Fingerprint)
	add("error", f.ErrorContains)
	if !f.FailedAfter.IsZero() {
		add("since", Moment(f.FailedAfter))
	}
	if !f.FailedBefore.IsZero() {
		add("until", Moment(f.FailedBefore))
	}
	if f.Limit > 0 {
		words = append(words, fmt.Sprintf("--limit=%d", f.Limit))
	}
	return cmp.Or(strings.Join(words, " "), everything)
}

// everything is the flag that chooses all.
const everything = "--all"

// Chooses reports whether the filter chooses anything. An empty filter stands for all.
func Chooses(f Filter) bool { return Flags(f) != everything }

// lister is a store that lists the messages that are not published.
type lister interface {
	Waiting(ctx context.Context, f outbox.WaitingFilter) ([]outbox.Waiting, error)
}

// WaitingAt lists the messages in the outbox of that name that are not published.
func (o *Operator) WaitingAt(ctx context.Context, name string, f outbox.WaitingFilter) ([]Message, error) {
	i := slices.IndexFunc(o.Config.Outboxes, func(b operator.Outbox) bool { return b.Name == name })
	store, ok := o.Config.Outboxes[i].Store.(lister)
	if !ok {
		return nil, errors.New("the store does not list waiting messages")
	}
	found, err := store.Waiting(ctx, f)
	return Mapped(found, func(w outbox.Waiting) Message {
		return Message{
			From: name, ID: w.ID, Name: w.Name, Key: w.Key, Class: w.Class, Error: w.Error, Attempts: w.Attempts,
			Transport: w.Transport, CreatedAt: jsonTime(w.CreatedAt), Unreadable: TextOf(w.Unreadable), Cursor: w.Cursor,
		}
	}), err
}

// parker is an inbox that keeps the messages behind a dead letter.
type parker interface {
	Behind(ctx context.Context, deadLetter uuid.UUID) ([]pgxdriver.Behind, int, error)
}

// Behind returns the first messages of its key that wait behind a message, and from a consumer the number of all. A consumer's
// messages that are ready are only counted: RabbitMQ would take them from the running consumers to show them.
func (o *Operator) Behind(ctx context.Context, at Place, m Message) (first []Message, n int, err error) {
	if at.Kind == KindOutbox && m.Key != "" {
		first, err = o.WaitingAt(ctx, at.Name, outbox.WaitingFilter{Key: m.Key})
		return first, 0, err
	}
	if at.Kind == KindOutbox {
		return nil, 0, nil
	}
	inbox, ok := o.consumerNamed(at.Name).Inbox.(parker)
	if !ok {
		return nil, 0, nil
	}
	found, n, err := inbox.Behind(ctx, m.ID)
	return Mapped(found, func(b pgxdriver.Behind) Message {
		shown, _, _ := ofConsumer(b.Message)
		shown.From, shown.CreatedAt = at.Name, jsonTime(b.ParkedAt)
		return shown
	}), n, err
}
