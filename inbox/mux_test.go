package inbox_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/internal/base"
	"github.com/holdfast-go/holdfast/internal/ids"
)

type order struct {
	Number string `json:"number"`
}

func message(name, body string) *inbox.Message {
	return &inbox.Message{ID: ids.New(), Name: name, Body: []byte(body), Attempt: 1}
}

func process(t *testing.T, p inbox.Processor, msg *inbox.Message) error {
	t.Helper()
	results := p.Process(t.Context(), []*inbox.Message{msg})
	if len(results) != 1 {
		t.Fatalf("%d results for one message", len(results))
	}
	return results[0]
}

func TestMuxRoutesByName(t *testing.T) {
	t.Parallel()
	mux := inbox.NewMux()
	var got []string
	handle := func(ctx context.Context, o order) error {
		msg, ok := inbox.FromContext(ctx)
		if !ok {
			t.Error("no message in the context")
		}
		got = append(got, msg.Name+" "+o.Number)
		return nil
	}
	for _, name := range []string{"order.placed", "order.placed.v2"} {
		if err := inbox.Handle(mux, name, handle); err != nil {
			t.Fatal(err)
		}
	}
	results := mux.Process(t.Context(), []*inbox.Message{
		message("order.placed", `{"number":"1"}`),
		message("order.unknown", `{}`),
		message("order.placed.v2", `{"number":"2","more":true}`),
	})
	if results[0] != nil || results[2] != nil || driver.Classify(results[1]).Class != driver.ClassValidation {
		t.Errorf("results = %v", results)
	}
	if want := []string{"order.placed 1", "order.placed.v2 2"}; !slices.Equal(got, want) {
		t.Errorf("handled %q, want %q", got, want)
	}
}

func TestMuxRefusesBadRegistrations(t *testing.T) {
	t.Parallel()
	mux := inbox.NewMux()
	noop := func(context.Context, order) error { return nil }
	if err := inbox.Handle(mux, "a", noop); err != nil {
		t.Fatal(err)
	}
	var none func(context.Context, order) error
	for name, err := range map[string]error{
		"twice":      inbox.Handle(mux, "a", noop),
		"no name":    inbox.Handle(mux, "", noop),
		"long name":  inbox.Handle(mux, strings.Repeat("n", 256), noop),
		"no func":    inbox.Handle(mux, "b", none),
		"no handler": mux.Register("b", nil),
	} {
		if err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
}

func TestMuxMiddlewareOrder(t *testing.T) {
	t.Parallel()
	var trail []string
	step := func(name string) inbox.Middleware {
		return func(next inbox.Handler) inbox.Handler {
			return func(ctx context.Context, m *inbox.Message) error {
				trail = append(trail, name)
				return next(ctx, m)
			}
		}
	}
	mux := inbox.NewMux()
	mux.Use(step("all 1"), step("all 2"))
	err := inbox.Handle(mux, "a", func(context.Context, order) error { return nil }, step("own 1"), step("own 2"))
	if err != nil {
		t.Fatal(err)
	}
	mux.Use(step("all 3"))
	if err := process(t, mux, message("a", `{}`)); err != nil {
		t.Fatal(err)
	}
	if err := process(t, mux, message("unknown", `{}`)); err == nil {
		t.Error("an unknown name was accepted")
	}
	want := []string{"all 1", "all 2", "all 3", "own 1", "own 2", "all 1", "all 2", "all 3"}
	if !slices.Equal(trail, want) {
		t.Errorf("trail = %q, want %q", trail, want)
	}
}

func TestMuxRecoversPanics(t *testing.T) {
	t.Parallel()
	mux := inbox.NewMux()
	if err := inbox.Handle(mux, "a", func(context.Context, order) error { panic("secret of the stack") }); err != nil {
		t.Fatal(err)
	}
	err := process(t, mux, message("a", `{}`))
	caught, ok := errors.AsType[*base.Panic](err)
	if !ok || !strings.Contains(string(caught.Stack), "TestMuxRecoversPanics") {
		t.Fatalf("error = %v", err)
	}
	if strings.Contains(err.Error(), "mux_test.go") {
		t.Error("the stack is in the error's text")
	}
	if f := driver.Classify(err); f.Class != driver.ClassDefault || f.Action != driver.ActionRetry {
		t.Errorf("classified %+v", f)
	}
}

func TestMuxDraining(t *testing.T) {
	t.Parallel()
	mux := inbox.NewMux()
	ctx, cancel := context.WithCancelCause(t.Context())
	handler := func(ctx context.Context, _ order) error {
		cancel(inbox.ErrDraining)
		return ctx.Err()
	}
	if err := inbox.Handle(mux, "a", handler); err != nil {
		t.Fatal(err)
	}
	results := mux.Process(ctx, []*inbox.Message{message("a", `{}`), message("a", `{}`)})
	for i, err := range results {
		if f := driver.Classify(err); f.Action != driver.ActionReturn || f.Counted {
			t.Errorf("message %d: %v classified %+v", i, err, f)
		}
	}
}

type waiter struct{ err error }

func (w waiter) Wait(context.Context) error { return w.err }

func TestBlocking(t *testing.T) {
	t.Parallel()
	ran := false
	next := func(context.Context, *inbox.Message) error { ran = true; return nil }
	if err := inbox.Blocking(waiter{})(next)(t.Context(), nil); err != nil || !ran {
		t.Errorf("error %v, ran %v", err, ran)
	}
	ran = false
	if err := inbox.Blocking(nil)(next)(t.Context(), nil); err != nil || !ran {
		t.Errorf("no waiter: error %v, ran %v", err, ran)
	}
	ran = false
	down := errors.New("limiter is down")
	err := inbox.Blocking(waiter{down})(next)(t.Context(), nil)
	if !errors.Is(err, down) || ran {
		t.Errorf("error %v, ran %v", err, ran)
	}
	if f := driver.Classify(err); f.Action != driver.ActionRetry || f.Counted || !f.Unlimited {
		t.Errorf("a limiter that is down costs the message an attempt: %+v", f)
	}
}

func TestMessageValidate(t *testing.T) {
	t.Parallel()
	if err := message("a", "").Validate(); err != nil {
		t.Errorf("valid message: %v", err)
	}
	for name, m := range map[string]*inbox.Message{
		"no id":     {Name: "a"},
		"v4":        {Name: "a", ID: uuid.New()},
		"no name":   {ID: ids.New()},
		"NUL":       {ID: ids.New(), Name: "a\x00"},
		"no UTF-8":  {ID: ids.New(), Name: "\xff"},
		"long name": {ID: ids.New(), Name: strings.Repeat("n", 256)},
	} {
		f := driver.Classify(m.Validate())
		if f.Class != driver.ClassValidation || f.Action != driver.ActionDead {
			t.Errorf("%s: %+v", name, f)
		}
	}
	if err := (&inbox.Message{}).Validate(); !strings.Contains(err.Error(), "id") || !strings.Contains(err.Error(), "name") {
		t.Errorf("not all violations in %v", err)
	}
}

func TestFallback(t *testing.T) {
	t.Parallel()
	mux := inbox.NewMux()
	m := &inbox.Message{ID: ids.New(), Name: "unknown"}
	one := func() error { return mux.Process(t.Context(), []*inbox.Message{m})[0] }
	if f := driver.Classify(one()); f.Class != driver.ClassValidation || f.Action != driver.ActionDead {
		t.Errorf("without a fallback: %+v", f)
	}
	mux.Fallback(func(context.Context, *inbox.Message) error { return nil })
	if err := one(); err != nil {
		t.Errorf("passed over: %v", err)
	}
	m.ID = uuid.Nil
	if f := driver.Classify(one()); f.Class != driver.ClassValidation {
		t.Errorf("without an id: %+v", f)
	}
}
