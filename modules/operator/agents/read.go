package agents

import (
	"cmp"
	"context"
	"errors"
	"fmt"

	"github.com/google/uuid"
	"github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/modules/operator"
	"github.com/holdfast-go/holdfast/modules/operator/internal/core"
	"github.com/holdfast-go/holdfast/outbox"
)

// nothing is the arguments of a tool that has none.
type nothing struct{}

func (a *agents) addReaders(s *mcp.Server) {
	addReader(s, "status", "The state of every outbox, consumer and sweep: what waits, for how long, and what failed. Times are in seconds.",
		func(ctx context.Context, _ nothing) (core.Status, error) { return a.o.LookForRates(ctx), nil })
	addReader(s, "groups", "The dead letters by the kind of their failure, the most frequent first: how many, since when, and the last one without its body.", a.groups)
	addReader(s, "dead_letters", fmt.Sprintf("The dead letters, those of an outbox the oldest first, without their bodies: at most %d of each outbox and consumer.", mostForAgents), a.deadLetters)
	addReader(s, "explain", "All that is known of one dead letter: its error, its attempts before, its trace, how many others failed in its way, "+
		"what waits behind it, and what its class means.", a.explain)
	addReader(s, "waiting", "The messages of the outboxes that are not published yet: ready, or parked until their next attempt.", a.waiting)
	addReader(s, "limits", "What one caller has left of the rate limits.", a.limits)
	addReader(s, "idempotency", "Whether an idempotency key is free, in flight or done.", a.idempotency)
	addReader(s, "log", "What operators did, by whom and why, the newest first.", a.log)
}

func (a *agents) groups(ctx context.Context, in core.Typed) (found[core.Group], error) {
	places, f, err := a.o.Choose(in, "")
	if err != nil {
		return found[core.Group]{}, err
	}
	all, err := core.Groups(ctx, places, f)
	return found[core.Group]{all[:min(len(all), mostForAgents)], len(all) > mostForAgents, core.TextOf(err)}, nil
}

// asksDeadLetters chooses dead letters that are listed.
type asksDeadLetters struct {
	core.Typed
	After string `json:"after,omitempty" jsonschema:"of one outbox: go on behind the dead letter with this cursor"`
}

func (a *agents) deadLetters(ctx context.Context, in asksDeadLetters) (found[core.Message], error) {
	in.Limit = min(cmp.Or(in.Limit, mostForAgents), mostForAgents)
	places, f, err := a.o.Choose(in.Typed, "")
	if err != nil {
		return found[core.Message]{}, err
	}
	if f.After = in.After; f.After != "" && len(places) != 1 {
		return found[core.Message]{}, errors.New("after: say by from which outbox")
	}
	more := false
	all, err := core.EachPlace(ctx, places, func(ctx context.Context, p core.Place) ([]core.Message, error) {
		of, err := p.List(ctx, f, false)
		more = more || len(of) >= f.Limit
		return of, err
	})
	return found[core.Message]{all, more, core.TextOf(err)}, nil
}

// asksWaiting chooses messages that are not published.
type asksWaiting struct {
	From   []string `json:"from,omitempty" jsonschema:"only of these outboxes, by the names that status tells"`
	Parked bool     `json:"parked,omitempty" jsonschema:"those that wait for their next attempt, in place of those that are ready"`
	Name   string   `json:"name,omitempty" jsonschema:"only messages of this name"`
	Key    string   `json:"key,omitempty" jsonschema:"only messages of this ordering key"`
	After  string   `json:"after,omitempty" jsonschema:"of one outbox: go on behind the message with this cursor"`
}

func (a *agents) waiting(ctx context.Context, in asksWaiting) (found[core.Message], error) {
	places, err := a.o.Chosen(in.From, core.KindOutbox)
	if err != nil {
		return found[core.Message]{}, err
	}
	f := outbox.WaitingFilter{Parked: in.Parked, Name: in.Name, Key: in.Key, Limit: mostForAgents, After: in.After}
	if in.After != "" && len(places) != 1 {
		return found[core.Message]{}, errors.New("after: say by from which outbox")
	}
	more := false
	all, err := core.EachPlace(ctx, places, func(ctx context.Context, p core.Place) ([]core.Message, error) {
		of, err := a.o.WaitingAt(ctx, p.Name, f)
		more = more || len(of) >= f.Limit
		return of, err
	})
	return found[core.Message]{all, more, core.TextOf(err)}, nil
}

// asksLimits names the caller whose limits are wanted.
type asksLimits struct {
	Key string `json:"key" jsonschema:"the key of the caller, such as a user's id"`
}

func (a *agents) limits(ctx context.Context, in asksLimits) (found[core.LimitState], error) {
	if in.Key == "" {
		return found[core.LimitState]{}, errors.New("say the key of one caller")
	}
	states, err := a.o.LimitStates(ctx, "", in.Key)
	if states == nil && err != nil {
		return found[core.LimitState]{}, err
	}
	return found[core.LimitState]{Found: states, Failed: core.TextOf(err)}, nil
}

// asksKey names an idempotency key.
type asksKey struct {
	Key   string `json:"key" jsonschema:"the key as the client sent it"`
	Scope string `json:"scope,omitempty" jsonschema:"the scope in which the service keeps the key, such as a tenant"`
}

func (a *agents) idempotency(ctx context.Context, in asksKey) (found[core.KnownKey], error) {
	key, err := idempotency.ParseOpaque(in.Key)
	if err != nil {
		return found[core.KnownKey]{}, errors.New("that is not a key: want 1 to 255 visible characters")
	}
	if in.Scope != "" {
		key = key.In(in.Scope)
	}
	all, err := a.o.LookAtKey(ctx, driver.Key(key), false)
	return found[core.KnownKey]{Found: all, Failed: core.TextOf(err)}, nil
}

// asksLog chooses what was done.
type asksLog struct {
	WithoutUpkeep bool `json:"without_upkeep,omitempty" jsonschema:"leave out sweep, prune and setup, which services do by themselves, too"`
}

func (a *agents) log(ctx context.Context, in asksLog) (found[operator.Action], error) {
	all, err := a.o.Actions(ctx, operator.LogFilter{Limit: mostForAgents, WithoutUpkeep: in.WithoutUpkeep})
	return found[operator.Action]{all, len(all) >= mostForAgents, core.TextOf(err)}, nil
}

// asksDeadLetter names one dead letter.
type asksDeadLetter struct {
	ID   string   `json:"id" jsonschema:"the id of the message"`
	From []string `json:"from,omitempty" jsonschema:"the outbox or the consumer, where several have the message"`
	Body bool     `json:"body,omitempty" jsonschema:"also the body and the headers, where they may be seen"`
}

// explained is a dead letter and what stands around it.
type explained struct {
	core.Message
	Trace string `json:"trace_id,omitempty"`
	// Meaning says what its class means. Empty: the class is the service's own.
	Meaning string `json:"meaning,omitempty"`
	// Alike is how many dead letters of the place have failed in its way.
	Alike int `json:"alike"`
	// Behind are messages of the same key that wait in the outbox, and Parked how many wait for a consumer.
	Behind []core.Message `json:"waiting_behind,omitempty"`
	Parked int            `json:"parked_behind,omitempty"`
	// Hidden says why the body is not shown.
	Hidden string `json:"hidden,omitempty"`
}

func (a *agents) explain(ctx context.Context, in asksDeadLetter) (found[explained], error) {
	id, err := uuid.Parse(in.ID)
	if err != nil {
		return found[explained]{}, fmt.Errorf("%.40q is not an id", in.ID)
	}
	if in.Body && !a.cfg.Access.Bodies {
		return found[explained]{}, errors.New("you may not see bodies")
	}
	places, err := a.o.Chosen(in.From, "")
	if err != nil {
		return found[explained]{}, err
	}
	all, err := core.EachPlace(ctx, places, func(ctx context.Context, p core.Place) ([]explained, error) { return a.explainAt(ctx, p, id, in.Body) })
	if len(all) == 0 && err == nil {
		err = fmt.Errorf("there is no dead letter %s: it was retried or dropped", id)
	}
	if len(all) == 0 {
		return found[explained]{}, err
	}
	return found[explained]{Found: all, Failed: core.TextOf(err)}, nil
}

func (a *agents) explainAt(ctx context.Context, p core.Place, id uuid.UUID, body bool) ([]explained, error) {
	all, err := p.List(ctx, core.Filter{IDs: []uuid.UUID{id}}, true)
	if err != nil || len(all) == 0 {
		return nil, err
	}
	e := explained{Message: all[0], Trace: all[0].TraceID(), Meaning: meanings[all[0].Class]}
	a.cover(&e, body)
	if e.Fingerprint != "" {
		if e.Alike, err = p.Count(ctx, core.Filter{Fingerprint: e.Fingerprint}); err != nil {
			return []explained{e}, err
		}
	}
	e.Behind, e.Parked, err = a.o.Behind(ctx, p, e.Key)
	return []explained{e}, err
}

// maxBodyForAgents bounds a body that is shown, in bytes.
const maxBodyForAgents = 64 << 10

// cover leaves out of a dead letter what may not be seen, or was not asked for.
func (a *agents) cover(e *explained, body bool) {
	if !body {
		e.Body, e.BodyBase64, e.Headers = "", "", nil
		return
	}
	shown := e.Masked(a.cfg.Mask)
	switch {
	case shown == nil:
		e.Hidden = core.HiddenByService
	case len(shown) > maxBodyForAgents:
		shown, e.Hidden = nil, fmt.Sprintf("the body has %d bytes, and at most %d are shown", len(shown), maxBodyForAgents)
	}
	e.Fill(e.Headers, shown)
}

// meanings say what the SDK's own classes mean.
var meanings = map[string]string{
	"default":       "every attempt failed. Mend what the error names, then retry.",
	"validation":    "the message cannot be decoded, has no valid id, or no handler knows its name. Deploy the handler or mend the sender; retry with a patch where the body alone is wrong.",
	"unrecoverable": "the handler says that another attempt is of no use. Mend the handler or the body before a retry.",
	"quarantined":   "the process died while it had the message, again and again. Find out why before a retry.",
	"permanent":     "the broker refuses the message for good: its size, its headers, or a right that is missing.",
	"unroutable":    "the broker has no queue for the message. Declare the binding, then retry.",
}

// mostForAgents is how many messages a tool lists at most: an agent reads all of them.
const mostForAgents = 100
