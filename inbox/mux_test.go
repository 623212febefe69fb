package inbox_test

import (
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"os"
	"runtime"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/internal/base"
	"github.com/holdfast-go/holdfast/internal/ids"
	"github.com/holdfast-go/holdfast/internal/testenv"
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
		noError(t, inbox.Handle(mux, name, handle))
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

func TestMux_rejectsBadRegistrations(t *testing.T) {
	t.Parallel()
	mux := inbox.NewMux()
	noop := func(context.Context, order) error { return nil }
	noError(t, inbox.Handle(mux, "a", noop))
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
		return func(context.Context, *inbox.Message) (context.Context, func(error) error, error) {
			trail = append(trail, name)
			return nil, func(result error) error { trail = append(trail, "end of "+name); return result }, nil
		}
	}
	mux := inbox.NewMux()
	mux.Use(step("all 1"), step("all 2"))
	err := inbox.Handle(mux, "a", func(context.Context, order) error { trail = append(trail, "work"); return nil }, step("own 1"), step("own 2"))
	noError(t, err)
	mux.Use(step("all 3"))
	noError(t, process(t, mux, message("a", `{}`)))
	want := "all 1, all 2, all 3, own 1, own 2, work, end of own 2, end of own 1, end of all 3, end of all 2, end of all 1"
	if got := strings.Join(trail, ", "); got != want {
		t.Errorf("trail = %s, want %s", got, want)
	}
	trail = nil
	if err := process(t, mux, message("unknown", `{}`)); err == nil {
		t.Error("an unknown name was accepted")
	}
	if got := strings.Join(trail, ", "); got != "all 1, all 2, all 3, end of all 3, end of all 2, end of all 1" {
		t.Errorf("trail = %s", got)
	}
}

type valueKey struct{}

// Middleware can add to the context, end a message early, and change its result.
func TestMux_middlewareChangesContextAndResult(t *testing.T) {
	t.Parallel()
	boom, skip, late := errors.New("boom"), errors.New("skip"), errors.New("late")
	var ends []error
	outer := func(context.Context, *inbox.Message) (context.Context, func(error) error, error) {
		return nil, func(result error) error { ends = append(ends, result); return result }, nil
	}
	for name, tt := range map[string]struct {
		middle inbox.Middleware
		ran    bool
		want   error
	}{
		"adds to the context": {ran: true, middle: func(ctx context.Context, _ *inbox.Message) (context.Context, func(error) error, error) {
			return context.WithValue(ctx, valueKey{}, 1), nil, nil
		}},
		"refuses": {want: boom, middle: func(context.Context, *inbox.Message) (context.Context, func(error) error, error) {
			return nil, nil, boom
		}},
		"passes over": {middle: func(context.Context, *inbox.Message) (context.Context, func(error) error, error) {
			return nil, func(error) error { return nil }, skip
		}},
		"fails at the end": {ran: true, want: late, middle: func(context.Context, *inbox.Message) (context.Context, func(error) error, error) {
			return nil, func(error) error { return late }, nil
		}},
		"panics": {want: boom, middle: func(context.Context, *inbox.Message) (context.Context, func(error) error, error) { panic(boom) }},
		"panics at the end": {ran: true, want: boom, middle: func(context.Context, *inbox.Message) (context.Context, func(error) error, error) {
			return nil, func(error) error { panic(boom) }, nil
		}},
	} {
		ends = nil
		ran := false
		mux := inbox.NewMux()
		mux.Use(outer, tt.middle)
		err := inbox.Handle(mux, "a", func(ctx context.Context, _ order) error {
			if ran = true; name == "adds to the context" && ctx.Value(valueKey{}) != 1 {
				t.Errorf("%s: nothing is added", name)
			}
			return nil
		})
		noError(t, err)
		err = process(t, mux, message("a", `{}`))
		if !errors.Is(err, tt.want) || ran != tt.ran || len(ends) != 1 || !errors.Is(ends[0], tt.want) {
			t.Errorf("%s: ran %v, result %v, outer middleware saw %v", name, ran, err, ends)
		}
	}
}

// The end of the middleware also runs if a handler exits its goroutine.
func TestMuxGoexit(t *testing.T) {
	t.Parallel()
	var seen error
	mux := inbox.NewMux()
	mux.Use(func(context.Context, *inbox.Message) (context.Context, func(error) error, error) {
		return nil, func(result error) error { seen = result; return result }, nil
	})
	noError(t, inbox.Handle(mux, "a", func(context.Context, order) error { runtime.Goexit(); return nil }))
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		mux.Process(t.Context(), []*inbox.Message{message("a", `{}`)})
	}()
	if <-ended; seen == nil {
		t.Error("the end of the middleware did not run")
	}
}

// A processor with its own work gets the work returned by the function of Route.
func TestDecode(t *testing.T) {
	t.Parallel()
	mux := inbox.NewMux()
	boom := errors.New("boom")
	err := mux.Route("a", func(m *inbox.Message) (any, error) {
		switch string(m.Body) {
		case "bad":
			return "no work", boom
		case "panic":
			panic(boom)
		}
		return "work on " + string(m.Body), nil
	})
	noError(t, err)
	calls := mux.Decode([]*inbox.Message{message("a", "1"), message("a", "bad"), message("a", "panic"), message("b", "2")})
	for i, want := range []any{"work on 1", nil, nil, nil} {
		_, err := calls[i].Begin(t.Context())
		if calls[i].Work != want || (err == nil) != (want != nil) {
			t.Errorf("%d: work %v, error %v", i, calls[i].Work, err)
		}
		if end := calls[i].End(err); !errors.Is(end, err) {
			t.Errorf("%d: %v became %v", i, err, end)
		}
	}
	if err := process(t, mux, message("a", "1")); err == nil || !strings.Contains(err.Error(), "another processor") {
		t.Errorf("the work of another processor: %v", err)
	}
}

func TestMuxRecoversPanics(t *testing.T) {
	t.Parallel()
	mux := inbox.NewMux()
	noError(t, inbox.Handle(mux, "a", func(context.Context, order) error { panic("secret of the stack") }))
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

type waiter struct{ err error }

func (w waiter) Wait(context.Context) error { return w.err }

func TestBlocking(t *testing.T) {
	t.Parallel()
	down := errors.New("limiter is down")
	for name, tt := range map[string]struct {
		waiter inbox.Waiter
		want   error
	}{"leave": {waiter: waiter{}}, "no waiter": {}, "down": {waiter{down}, down}} {
		inner, end, err := inbox.Blocking(tt.waiter)(t.Context(), nil)
		if !errors.Is(err, tt.want) || inner != nil || end != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	_, _, err := inbox.Blocking(waiter{down})(t.Context(), nil)
	if f := driver.Classify(err); f.Action != driver.ActionRetry || f.Counted || !f.Unlimited {
		t.Errorf("a limiter that is down costs the message an attempt: %+v", f)
	}
}

// patientWaiter waits until the context ends.
type patientWaiter struct{}

func (patientWaiter) Wait(ctx context.Context) error {
	<-ctx.Done()
	return ctx.Err()
}

// A wait leaves half of the time to the handler, and a wait that ends costs the message no attempt.
func TestBlocking_leavesHalfOfTheTime(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		start := time.Now()
		_, _, err := inbox.Blocking(patientWaiter{})(ctx, nil)
		if waited := time.Since(start); waited != 30*time.Second {
			t.Errorf("waited %v of the minute, want half of it", waited)
		}
		if f := driver.Classify(err); f.Action != driver.ActionRetry || f.Counted || !f.Unlimited {
			t.Errorf("a wait that takes too long costs the message an attempt: %+v", f)
		}
	})
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

func TestSetLimit(t *testing.T) {
	t.Parallel()
	mux := inbox.NewMux()
	noError(t, mux.SetLimit("a", 3))
	if err := mux.SetLimit("a", -1); err == nil {
		t.Error("a negative limit was accepted")
	}
	var limiter driver.Limiter = mux
	if a, b := limiter.Limit("a"), limiter.Limit("b"); a != 3 || b != 0 {
		t.Errorf("limits %d and %d", a, b)
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

func noError(t testing.TB, errs ...error) {
	t.Helper()
	for _, err := range errs {
		if err != nil {
			t.Fatal(err)
		}
	}
}

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

// A decode function takes the place of JSON, gets bodies unpacked, and may leave a content type to DecodeJSON.
func TestMux_setDecode(t *testing.T) {
	t.Parallel()
	mux := inbox.NewMux()
	later := errors.New("registry is down")
	mux.SetDecode(func(m *inbox.Message, v any) error {
		number, text, _ := strings.Cut(string(m.Body), "=")
		switch {
		case m.ContentType != "text/plain":
			return inbox.DecodeJSON(m, v)
		case text == "later":
			return inbox.Unavailable(later)
		case number != "number" || m.ContentEncoding == "gzip":
			return errors.New("no number")
		}
		v.(*order).Number = text
		return nil
	})
	var got []string
	noError(t, inbox.Handle(mux, "value", func(_ context.Context, o order) error { got = append(got, o.Number); return nil }))
	noError(t, inbox.Handle(mux, "pointer", func(_ context.Context, o *order) error { got = append(got, o.Number); return nil }))
	packed := gzipped(t, "number=3")
	for _, m := range []*inbox.Message{
		{Name: "value", Body: []byte("number=1"), ContentType: "text/plain"},
		{Name: "pointer", Body: []byte("number=2"), ContentType: "text/plain"},
		{Name: "pointer", Body: packed, ContentType: "text/plain", ContentEncoding: "gzip"},
		{Name: "pointer", Body: []byte(`{"number":"4"}`)},
	} {
		m.ID = ids.New()
		noError(t, process(t, mux, m))
		if len(m.Body) == len(packed) && m.ContentEncoding == "gzip" && string(m.Body) != string(packed) {
			t.Error("the message was changed")
		}
	}
	if want := []string{"1", "2", "3", "4"}; !slices.Equal(got, want) {
		t.Errorf("handled %v, want %v", got, want)
	}
	for body, want := range map[string]driver.Action{"number": driver.ActionDead, "x=1": driver.ActionDead, "number=later": driver.ActionReturn} {
		m := &inbox.Message{ID: ids.New(), Name: "value", Body: []byte(body), ContentType: "text/plain"}
		if body == "number" {
			m.Body = make([]byte, driver.MaxBodyBytes+1)
		}
		err := process(t, mux, m)
		if f := driver.Classify(err); f.Action != want || want == driver.ActionDead && f.Class != driver.ClassValidation {
			t.Errorf("%s: %v, classified %+v, want %s", body, err, f, want)
		}
	}
}

func gzipped(t *testing.T, text string) []byte {
	t.Helper()
	var packed bytes.Buffer
	w := gzip.NewWriter(&packed)
	_, err := w.Write([]byte(text))
	noError(t, errors.Join(err, w.Close()))
	return packed.Bytes()
}
