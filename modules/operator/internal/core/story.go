package core

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"

	inboxdriver "github.com/holdfast-go/holdfast/inbox/driver"
	pgxdriver "github.com/holdfast-go/holdfast/inbox/inboxpgx/driver"
	"github.com/holdfast-go/holdfast/internal/ids"
	"github.com/holdfast-go/holdfast/modules/operator"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
)

// Story is all that the parts of a service know about one message.
type Story struct {
	ID uuid.UUID `json:"id"`
	// TraceID is the trace that wrote the message, and TraceURL its address by Config.TraceURL.
	TraceID  string `json:"trace_id,omitempty"`
	TraceURL string `json:"trace_url,omitempty"`
	// Events are in order of time. Those without a time describe the present, and come before the ones that are due.
	Events []Event `json:"events"`
	// Missing says where the message was not found, and how long it would be kept there.
	Missing []string `json:"missing,omitempty"`
	// Failed are the errors of parts that did not answer.
	Failed []string `json:"failed,omitempty"`
	// Copies are the dead letters of this id, and the messages that wait for an attempt, whole.
	Copies []Message `json:"copies,omitempty"`
}

// Event is one line of a Story.
type Event struct {
	At     time.Time `json:"at,omitzero"`
	Part   string    `json:"part,omitempty"`
	What   string    `json:"what"`
	Detail string    `json:"detail,omitempty"`
}

// Known reports whether any part knows the message.
func (s Story) Known() bool { return len(s.Events) > 0 }

// UnknownHint follows the sentence that no part knows a message.
const UnknownHint = ". Check the id. It may have been dropped, or processed so long ago that its entries are gone: see the log"

// storyEvery is the shortest time between the starts of two lookups. One lookup reads every part.
const storyEvery = 100 * time.Millisecond

// storyPart bounds the lookup in one part, so that a server that is down does not hold up the others.
const storyPart = 15 * time.Second

// pace admits one lookup at a time. The next one waits as long as the lookup took, and at least storyEvery: on RabbitMQ a lookup
// holds up retries.
type pace struct {
	turn chan struct{} // capacity 1
	next time.Time     // when the next lookup may start; whoever holds the turn may use it
}

func (p *pace) enter(ctx context.Context) (leave func(), err error) {
	select {
	case p.turn <- struct{}{}:
	case <-ctx.Done():
		return nil, fmt.Errorf("other messages are being looked up: %w", ctx.Err())
	}
	var began time.Time
	leave = func() {
		now := time.Now()
		p.next = now.Add(max(storyEvery, now.Sub(began)))
		<-p.turn
	}
	select {
	case <-time.After(time.Until(p.next)):
	case <-ctx.Done():
		<-p.turn
		return nil, ctx.Err()
	}
	began = time.Now()
	return leave, nil
}

// teller collects a Story from several parts at the same time.
type teller struct {
	mu sync.Mutex
	Story
	missing map[string]string // by part
}

func (t *teller) add(events ...Event) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.Events = append(t.Events, events...)
}

// lacks notes that a part does not have the message.
func (t *teller) lacks(part, why string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.missing[part] = why
}

func (t *teller) failed(part string, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.Failed = append(t.Failed, Plain(part+": "+OneLine(err)))
}

// trace remembers the trace of the message.
func (t *teller) trace(headers map[string]string) {
	m := Message{Headers: headers}
	if id := m.TraceID(); id != "" {
		t.mu.Lock()
		defer t.mu.Unlock()
		t.TraceID = id
	}
}

// Story looks up the one message whose id was typed, in the typed places and in the log. Copies are its dead letters and waiting
// messages if the caller has read them; nil: they are looked up, too. A part that fails is in Failed. Lookups of one process
// run one after the other.
func (o *Operator) Story(ctx context.Context, typed Typed, copies []Message) (Story, error) {
	places, f, err := o.Choose(typed, "")
	if err != nil {
		return Story{}, err
	}
	id := f.IDs[0]
	retrying := slices.DeleteFunc(o.retryingPlaces(), func(r Place) bool {
		return !slices.ContainsFunc(places, func(p Place) bool { return p.Name == r.Name })
	})
	leave, err := o.stories.enter(ctx)
	if err != nil {
		return Story{}, err
	}
	defer leave()
	t := &teller{Story: Story{ID: id, Events: []Event{}, Copies: copies}, missing: map[string]string{}}
	var all sync.WaitGroup
	look := func(part string, do func(context.Context) error) {
		all.Go(func() {
			ctx, cancel := context.WithTimeout(ctx, storyPart)
			defer cancel()
			if err := do(ctx); err != nil {
				t.failed(part, err)
			}
		})
	}
	for _, p := range append(retrying, places...) {
		if copies == nil {
			look(p.Name, func(ctx context.Context) error { return t.findCopies(ctx, p, id) })
		}
	}
	for _, p := range places {
		look(p.Name, func(ctx context.Context) error {
			if p.Kind == KindOutbox {
				return t.findRow(ctx, o.outboxNamed(p.Name), id)
			}
			return t.findEntry(ctx, o.consumerNamed(p.Name), id)
		})
	}
	all.Wait()
	slices.SortStableFunc(t.Copies, func(a, b Message) int { return strings.Compare(a.From, b.From) })
	for _, m := range t.Copies {
		t.trace(m.Headers)
		t.add(eventsOf(m)...)
	}
	if err := o.addActions(ctx, t, places); err != nil {
		t.failed("log", err)
	}
	return o.ordered(t), nil
}

// ordered returns the collected story, with its events in order.
func (o *Operator) ordered(t *teller) Story {
	s := t.Story
	if s.TraceID != "" && o.Config.TraceURL != "" {
		s.TraceURL = strings.ReplaceAll(o.Config.TraceURL, traceID, s.TraceID)
	}
	if s.Known() && s.ID.Version() == 7 && !slices.ContainsFunc(s.Events, func(e Event) bool { return e.What == written }) {
		s.Events = append(s.Events, Event{At: ids.Time(s.ID), What: "id created"})
	}
	now := time.Now()
	slices.SortStableFunc(s.Events, func(a, b Event) int { return a.order(now).Compare(b.order(now)) })
	s.Events = slices.CompactFunc(s.Events, func(a, b Event) bool { return a == b })
	for part, why := range t.missing {
		if !slices.ContainsFunc(s.Events, func(e Event) bool { return e.Part == part }) {
			s.Missing = append(s.Missing, part+": "+why)
		}
	}
	slices.Sort(s.Missing)
	slices.Sort(s.Failed)
	return s
}

// order is the time by which an event is sorted. The present comes after the past.
func (e Event) order(now time.Time) time.Time {
	if e.At.IsZero() {
		return now
	}
	return e.At
}

func (o *Operator) outboxNamed(name string) operator.Outbox {
	i := slices.IndexFunc(o.Config.Outboxes, func(b operator.Outbox) bool { return b.Name == name })
	return o.Config.Outboxes[i]
}

func (o *Operator) consumerNamed(name string) operator.Consumer {
	i := slices.IndexFunc(o.Config.Consumers, func(c operator.Consumer) bool { return c.Name == name })
	return o.Config.Consumers[i]
}

// written is the event of a stored message.
const written = "written"

func (t *teller) findCopies(ctx context.Context, p Place, id uuid.UUID) error {
	found, err := p.List(ctx, Filter{IDs: []uuid.UUID{id}}, true)
	t.mu.Lock()
	defer t.mu.Unlock()
	t.Copies = append(t.Copies, found...)
	return err
}

// outboxLooker is an outbox that looks at one message.
type outboxLooker interface {
	Look(ctx context.Context, id uuid.UUID) (driver.Known, error)
}

// retainer is a store that keeps something for some time.
type retainer interface{ Retention() time.Duration }

// kept returns for how long a store keeps something; "": unknown.
func kept(store any) string {
	if r, ok := store.(retainer); ok && r.Retention() > 0 {
		return Lasting(r.Retention().Seconds())
	}
	return ""
}

func (t *teller) findRow(ctx context.Context, b operator.Outbox, id uuid.UUID) error {
	store, ok := b.Store.(outboxLooker)
	if !ok {
		return nil
	}
	k, err := store.Look(ctx, id)
	if errors.Is(err, outbox.ErrNotFound) {
		after := "at once"
		if retention := kept(b.Store); retention != "" {
			after = "after " + retention
		}
		t.lacks(b.Name, "no row waits. It was published and deleted "+after+", or never written here")
		return nil
	}
	if err != nil {
		return err
	}
	t.trace(k.Headers)
	detail := k.Name
	if k.Key != "" {
		detail += ", key " + k.Key
	}
	t.add(Event{At: jsonTime(k.CreatedAt), Part: b.Name, What: written, Detail: detail})
	if k.Attempts > 0 {
		t.add(Event{Part: b.Name, What: failedAttempts(k.Attempts), Detail: string(k.Class) + ": " + k.Error})
	}
	switch {
	case !k.PublishedAt.IsZero():
		t.add(Event{At: jsonTime(k.PublishedAt), Part: b.Name, What: "published"})
	case k.DueAt.IsZero():
		t.add(Event{Part: b.Name, What: "waits for a relay"})
	default:
		t.add(Event{At: jsonTime(k.DueAt), Part: b.Name, What: "next attempt"})
	}
	return nil
}

func failedAttempts(n int) string {
	if n == 1 {
		return "1 attempt failed"
	}
	return fmt.Sprint(n, " attempts failed")
}

// inboxLooker is an inbox that looks at one message.
type inboxLooker interface {
	Look(ctx context.Context, id uuid.UUID) (pgxdriver.Known, error)
}

// noting is an inbox with a ledger of runs.
type noting interface{ Ledger() inboxdriver.Ledger }

func (t *teller) findEntry(ctx context.Context, c operator.Consumer, id uuid.UUID) error {
	store, ok := c.Inbox.(inboxLooker)
	if !ok {
		t.lacks(c.Name, "it has no inbox table, so only its dead letters can be looked up")
		return nil
	}
	known, err := store.Look(ctx, id)
	if err != nil {
		return err
	}
	switch {
	case !known.ProcessedAt.IsZero():
		t.add(Event{At: jsonTime(known.ProcessedAt), Part: c.Name, What: "processed"})
		return nil
	case !known.ParkedAt.IsZero():
		detail := fmt.Sprintf("its key is stopped by the dead letter %s", known.StoppedBy)
		switch known.StoppedBy {
		case id:
			detail = "as the dead letter that stops its key"
		case uuid.Nil:
			detail = "the messages of its key run, one after the other"
		}
		t.add(Event{At: jsonTime(known.ParkedAt), Part: c.Name, What: "parked", Detail: detail})
	default:
		t.lacks(c.Name, "no entry. It was not processed here"+orLonger(kept(c.Inbox)))
	}
	notes, ok := c.Inbox.(noting)
	if !ok || notes.Ledger() == nil {
		return nil
	}
	run, err := notes.Ledger().Look(ctx, id)
	if err == nil && run != (inboxdriver.LedgerEntry{}) {
		t.add(runOf(c.Name, run, time.Now()))
	}
	return err
}

// orLonger ends the sentence about a missing entry.
func orLonger(retention string) string {
	if retention == "" {
		return ""
	}
	return ", or more than " + retention + " ago"
}

// runOf is the event of the ledger's entry.
func runOf(part string, run inboxdriver.LedgerEntry, now time.Time) Event {
	e := Event{Part: part, What: fmt.Sprint("attempt ", max(run.Attempt, 1))}
	if run.Overdue > 0 {
		e.At = now.Add(-run.Overdue)
	}
	switch {
	case run.Open == 1:
		e.Detail = "started; it runs, or its process died"
	case run.Open > 1:
		e.Detail = fmt.Sprintf("started %d times without an end; processes may have died", run.Open)
	case run.Overdue > 0:
		e.Detail = "due"
	default:
		e.Detail = "waits for its time"
	}
	return e
}

// eventsOf returns the events that a copy has. A row of an outbox that waits has its own.
func eventsOf(m Message) []Event {
	waits, stored := !m.DueAt.IsZero(), m.Queue == ""
	if waits && stored {
		return nil
	}
	var all []Event
	if !m.CreatedAt.IsZero() {
		what := "sent"
		if stored {
			what = written
		}
		all = append(all, Event{At: m.CreatedAt, Part: m.From, What: what, Detail: m.Name})
	}
	for _, a := range m.History {
		all = append(all, Event{At: a.At, Part: m.From, What: failedAttempts(1), Detail: a.Error})
	}
	if m.Replays > 0 {
		all = append(all, Event{At: m.FirstFailed, Part: m.From, What: "failed again", Detail: fmt.Sprintf("after %d replays", m.Replays)})
	}
	why := Event{At: m.FailedAt, Part: m.From, What: failedAttempts(m.Attempts), Detail: m.Class + ": " + m.Error}
	if waits {
		return append(all, why, Event{At: m.DueAt, Part: m.From, What: "next attempt"})
	}
	why.What, why.Detail = "dead letter", why.What+", "+why.Detail
	return append(all, why)
}

// maxActions bounds the actions in a story.
const maxActions = 1000

// oneID matches an id in the selection of an action.
var oneID = regexp.MustCompile(`\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b`)

// addActions adds the actions that named the message, and the ones that may have included it: changes of many dead letters
// between the first event and the last one.
func (o *Operator) addActions(ctx context.Context, t *teller, places []Place) error {
	actions, err := o.Actions(ctx, operator.LogFilter{Limit: maxActions, WithoutUpkeep: true})
	from, to := t.span()
	for _, a := range actions {
		here := slices.ContainsFunc(places, func(p Place) bool { return p.Name == a.On })
		if !here || a.What == Pausing || a.What == Resuming {
			continue
		}
		named := strings.Contains(a.Chosen, t.ID.String())
		several := !oneID.MatchString(a.Chosen) || strings.Contains(a.Chosen, " ids, the first ")
		if named || several && !from.IsZero() && a.At.After(from) && a.At.Before(to) {
			t.add(Event{At: a.At, Part: a.On, What: a.What, Detail: author(a, named)})
		}
	}
	return err
}

// author describes an action: its author, its reason, its failure, and whether it is sure that it chose the message.
func author(a operator.Action, named bool) string {
	text := "by " + a.By
	if a.Reason != "" {
		text += ": " + a.Reason
	}
	if !named {
		text += " (may have included it: " + Short(a.Chosen, 100) + ")"
	}
	if a.Failure != "" {
		text += "; failed: " + Short(a.Failure, 200)
	}
	return text
}

// span returns the times between which actions concern the message: from its first event until it was processed, or now.
func (t *teller) span() (from, to time.Time) {
	to = time.Now()
	for _, e := range t.Events {
		if !e.At.IsZero() && (from.IsZero() || e.At.Before(from)) {
			from = e.At
		}
	}
	if t.ID.Version() == 7 && t.Known() {
		if made := ids.Time(t.ID); made.Before(from) || from.IsZero() {
			from = made
		}
	}
	if last := t.processed(); len(t.Copies) == 0 && !last.IsZero() {
		to = last.Add(time.Second) // the time of an entry is rounded
	}
	return from, to
}

// processed returns the time of the last effect; zero: there is none.
func (t *teller) processed() (last time.Time) {
	for _, e := range t.Events {
		if e.What == "processed" && e.At.After(last) {
			last = e.At
		}
	}
	return last
}
