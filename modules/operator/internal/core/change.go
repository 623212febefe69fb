package core

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"slices"

	jsonpatch "github.com/evanphx/json-patch/v5"

	"github.com/holdfast-go/holdfast/modules/operator"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
)

// Validate rejects a change that the log could not store. By may be empty.
func Validate(c Change) error {
	switch {
	case len(c.By) > 128 || Plain(c.By) != c.By:
		return errors.New("by must be at most 128 bytes without control characters")
	case len(c.Reason) > 1000 || Plain(c.Reason) != c.Reason:
		return errors.New("reason must be at most 1,000 bytes without control characters")
	case !(c.PerSecond >= 0):
		return errors.New("rate must not be negative")
	}
	return nil
}

// editAndRetry is the name, in the log, of a retry that replaced bodies.
const editAndRetry = "edit and retry"

// Changed is the result of a command in one place. Count messages were changed, Outlived ones are too old to be
// retried, and Failed ones could not be changed.
type Changed struct {
	From     string `json:"from"`
	Count    int    `json:"count"`
	Outlived int    `json:"outlived,omitempty"`
	Failed   int    `json:"failed,omitempty"`
	DryRun   bool   `json:"dry_run,omitempty"`
}

// Apply changes the chosen messages of one place: retry, drop, or postpone by c.Delay. The place itself or the log records the change.
func (o *Operator) Apply(ctx context.Context, what string, p Place, f Filter, c Change) (Replayed, error) {
	do := func() (Replayed, error) {
		switch {
		case what == "retry", what == Postponing && p.Retrying && c.Delay > 0:
			return p.replay(ctx, f, c)
		case what != "drop":
			return Replayed{}, fmt.Errorf("%.40q is no change", what)
		case c.DryRun:
			n, err := p.Count(ctx, f)
			return Replayed{Returned: n}, err
		}
		n, err := p.remove(ctx, f, c)
		return Replayed{Returned: n}, err
	}
	if c.DryRun || p.keepsLog() {
		return do()
	}
	var r Replayed
	noted := what
	if c.Edit != nil {
		noted = editAndRetry
	}
	err := o.Noted(ctx, operator.Action{What: noted, On: p.Name, Chosen: p.flags(f), By: c.By, Reason: c.Reason}, func() (int, error) {
		var err error
		r, err = do()
		return r.Returned, err
	})
	return r, err
}

// ApplyTo changes the chosen dead letters of several places. If shown is not nil, it may extend the change of a place before it
// starts, and returns a function to call at its end.
func (o *Operator) ApplyTo(
	ctx context.Context, what string, places []Place, f Filter, c Change, shown func(Place, Change) (Change, func()),
) ([]Changed, error) {
	return EachPlace(ctx, places, func(ctx context.Context, p Place) ([]Changed, error) {
		c := c
		if shown != nil {
			var end func()
			c, end = shown(p, c)
			defer end()
		}
		r, err := o.Apply(ctx, what, p, f, c)
		if err == nil && r.Failed > 0 {
			err = fmt.Errorf("%d failed", r.Failed)
		}
		return []Changed{{From: p.Name, Count: r.Returned, Outlived: r.Outlived, Failed: r.Failed, DryRun: c.DryRun}}, err
	})
}

// MaxEdit bounds a body or a patch that is typed or read.
const MaxEdit = 1 << 20

// Edit replaces the bodies of messages that are sent again. The zero value leaves them as they are.
type Edit struct {
	Body  []byte // of the one chosen message; nil: no new body
	Patch string // a JSON merge patch for each message: https://www.rfc-editor.org/rfc/rfc7396
}

// None reports whether the bodies stay as they are.
func (e Edit) None() bool { return e.Body == nil && e.Patch == "" }

// Validate rejects a body together with a patch, one that is too large, and a patch that is no JSON object.
func (e Edit) Validate() error {
	var object map[string]json.RawMessage
	switch {
	case e.Body != nil && e.Patch != "":
		return errors.New("a body and a patch exclude each other")
	case max(len(e.Body), len(e.Patch)) > MaxEdit:
		return fmt.Errorf("a body or a patch has at most %d bytes", MaxEdit)
	case e.Patch != "" && (json.Unmarshal([]byte(e.Patch), &object) != nil || object == nil):
		return errors.New("a patch is a JSON object: its fields replace those of the body, null removes one (RFC 7396)")
	}
	return nil
}

// apply returns the new body of a message.
func (e Edit) apply(body []byte) ([]byte, error) {
	if e.Body != nil {
		return e.Body, nil
	}
	if !bytes.HasPrefix(bytes.TrimLeft(body, " \t\r\n"), []byte("{")) {
		return nil, errors.New("the body is no JSON object")
	}
	return jsonpatch.MergePatch(body, []byte(e.Patch))
}

// Function returns the edit for one change. It asks may about each message first. It is nil if nothing is edited.
func (e Edit) Function(may func(operator.MaskedMessage) error) func(operator.MaskedMessage) ([]byte, error) {
	if e.None() {
		return nil
	}
	given := map[string]bool{} // places where a message got the body
	return func(m operator.MaskedMessage) ([]byte, error) {
		if e.Body != nil && given[m.From] {
			return nil, errors.New("another message with the same id already got the body")
		}
		if may != nil {
			if err := may(m); err != nil {
				return nil, err
			}
		}
		given[m.From] = true
		return e.apply(m.Body)
	}
}

// Masking returns mask with a recovery: it hides a body if mask panics. A mask also runs outside HTTP handlers, where a
// panic would end the service.
func Masking(mask func(operator.MaskedMessage) []byte) func(operator.MaskedMessage) []byte {
	if mask == nil {
		return nil
	}
	return func(m operator.MaskedMessage) (shown []byte) {
		defer func() {
			if failure := recover(); failure != nil {
				slog.Error("operator: mask panicked", slog.String("from", m.From), slog.Any("panic", failure), slog.String("stack", string(debug.Stack())))
				shown = nil
			}
		}()
		return mask(m)
	}
}

// MayEdit rejects a message if mask hides any of its body. It is nil if there is no mask.
func MayEdit(mask func(operator.MaskedMessage) []byte) func(operator.MaskedMessage) error {
	if mask == nil {
		return nil
	}
	return func(m operator.MaskedMessage) error {
		shown := m
		shown.Body = slices.Clone(m.Body)
		if !bytes.Equal(mask(shown), m.Body) {
			return errors.New("the service hides a part of the body")
		}
		return nil
	}
}

// auditor is a store that records changes of its dead letters by itself.
type auditor interface {
	Audit(ctx context.Context, limit int) ([]outboxpgx.AuditEntry, error)
}

// Actions returns the newest actions, from the log and from outboxes that record their own.
func (o *Operator) Actions(ctx context.Context, f operator.LogFilter) ([]operator.Action, error) {
	all := []operator.Action{}
	var failed []error
	if o.Config.Log != nil {
		noted, err := o.Config.Log.List(ctx, f)
		all, failed = append(all, noted...), append(failed, err)
	}
	for _, b := range o.Config.Outboxes {
		store, ok := b.Store.(auditor)
		if !ok {
			continue
		}
		entries, err := store.Audit(ctx, f.Limit)
		failed = append(failed, err)
		for _, e := range entries {
			all = append(all, auditAction(b.Name, e))
		}
	}
	slices.SortStableFunc(all, func(a, b operator.Action) int { return b.At.Compare(a.At) })
	return all[:min(f.Limit, len(all))], errors.Join(failed...)
}

func auditAction(name string, e outboxpgx.AuditEntry) operator.Action {
	what := map[string]string{"replay": "retry", "edit": editAndRetry, "remove": "drop"}[e.Action]
	if what == "" {
		what = e.Action
	}
	return operator.Action{At: e.At, What: what, On: name, Chosen: chosenBy(e.Action, e.Filter), By: e.By, Reason: e.Reason, Count: &e.Count}
}

// Noted runs do and logs it. If the log fails, do is not called.
func (o *Operator) Noted(ctx context.Context, a operator.Action, do func() (int, error)) error {
	if o.Config.Log == nil {
		_, err := do()
		return err
	}
	number, err := o.Config.Log.Begin(ctx, a)
	if err != nil {
		return err
	}
	n, err := do()
	failure := ""
	if err != nil {
		failure = Short(Plain(OneLine(err)), 1000) // a NUL could not be stored
	}
	return errors.Join(err, o.Config.Log.End(context.WithoutCancel(ctx), number, n, failure))
}

// Turned is one part that was paused or resumed.
type Turned struct {
	Part   string `json:"part"`
	Paused bool   `json:"paused"`
	DryRun bool   `json:"dry_run,omitempty"`
}

// Pausable is a part that can be paused. Outboxes and inboxes have the same methods and the same Pause.
type Pausable struct {
	Name  string
	store driver.Pausable
}

// pausableOf returns the pause of a store, or nil.
func pausableOf(name string, store any) *Pausable {
	if s, ok := store.(driver.Pausable); ok {
		return &Pausable{name, s}
	}
	return nil
}

// Pausables returns the parts that can be paused: outboxes, and consumers with an inbox.
func (o *Operator) Pausables() []Pausable {
	var all []Pausable
	add := func(name string, store any) {
		if p := pausableOf(name, store); p != nil {
			all = append(all, *p)
		}
	}
	for _, b := range o.Config.Outboxes {
		add(b.Name, b.Store)
	}
	for _, c := range o.Config.Consumers {
		add(c.Name, c.Inbox)
	}
	return all
}

// PausableNamed returns the part with that name.
func (o *Operator) PausableNamed(name string) (Pausable, error) {
	all := o.Pausables()
	i := slices.IndexFunc(all, func(p Pausable) bool { return p.Name == name })
	if i < 0 {
		return Pausable{}, fmt.Errorf("%.70q is no outbox, and no consumer with an inbox", name)
	}
	return all[i], nil
}

// state returns the pause; nil: there is none, or the part cannot be paused.
func (p *Pausable) state(ctx context.Context) (*driver.Pause, error) {
	if p == nil {
		return nil, nil
	}
	s, err := p.store.Paused(ctx)
	if err != nil || s.Since.IsZero() {
		return nil, err
	}
	return &s, nil
}

// The changes of a pause.
const (
	Pausing  = "pause"
	Resuming = "resume"
)

// Turn pauses or resumes a part, and logs it.
func (o *Operator) Turn(ctx context.Context, what string, p Pausable, c Change) error {
	if c.DryRun {
		_, err := p.store.Paused(ctx)
		return err
	}
	return o.Noted(ctx, operator.Action{What: what, On: p.Name, By: c.By, Reason: c.Reason}, func() (int, error) {
		do := p.store.Resume
		if what == Pausing {
			do = func(ctx context.Context) error { return p.store.Pause(ctx, c.By, c.Reason) }
		}
		if err := do(ctx); err != nil {
			return 0, err
		}
		return 1, nil
	})
}
