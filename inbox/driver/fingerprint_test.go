package driver_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"reflect"
	"strconv"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/internal/ids"
)

// refusal is an error with a SQLSTATE, like those of a database client.
type refusal struct{ code string }

func (e *refusal) Error() string    { return "refused with " + e.code }
func (e *refusal) SQLState() string { return e.code }

// given returns the dead letter of a message with that name whose handler failed with err.
func given(name string, err error) inbox.DeadLetter {
	m := &inbox.Message{ID: ids.New(), Name: name}
	return driver.NewDeadLetter(m, driver.Classify(err), "billing", time.Now())
}

func TestErrorType(t *testing.T) {
	t.Parallel()
	_, missing := os.Open("/does/not/exist")
	for name, tt := range map[string]struct {
		err             error
		goType, sqlText string
	}{
		"plain":                 {errors.New("boom"), "*errors.errorString", ""},
		"wrapped":               {fmt.Errorf("read: %w", missing), "*fs.PathError", ""},
		"marked":                {inbox.Classed(inbox.Unrecoverable(missing), "files"), "*fs.PathError", ""},
		"joined":                {errors.Join(nil, missing, errors.New("boom")), "*fs.PathError", ""},
		"a server's":            {fmt.Errorf("insert: %w", &refusal{"23505"}), "*driver_test.refusal", "23505"},
		"behind another":        {errors.Join(missing, &refusal{"40001"}), "*fs.PathError", "40001"},
		"with an invalid state": {&refusal{"23505; DROP"}, "*driver_test.refusal", ""},
	} {
		d := given("order.placed", tt.err)
		if d.ErrorType != tt.goType || d.SQLState != tt.sqlText {
			t.Errorf("%s: type %q, state %q, want %q, %q", name, d.ErrorType, d.SQLState, tt.goType, tt.sqlText)
		}
	}
}

func TestFingerprint(t *testing.T) {
	t.Parallel()
	of := func(name string, err error) string { return given(name, err).Fingerprint }
	first := of("order.placed", fmt.Errorf("seat %d of %q is taken", 7, "ann"))
	if len(first) != 16 || first != of("order.placed", fmt.Errorf("seat %d of %q is taken", 12, "bob the builder")) {
		t.Errorf("one kind of failure has several fingerprints, the first is %q", first)
	}
	for name, other := range map[string]string{
		"another message": of("order.cancelled", errors.New("seat 7 of \"ann\" is taken")),
		"another text":    of("order.placed", errors.New("seat 7 is gone")),
		"another class":   of("order.placed", inbox.Classed(errors.New("seat 7 of \"ann\" is taken"), "seats")),
		"another type":    of("order.placed", &refusal{"23505"}),
	} {
		if other == first {
			t.Errorf("%s has the same fingerprint", name)
		}
	}
	if of("a", &refusal{"23505"}) == of("a", &refusal{"23503"}) {
		t.Error("another SQLSTATE has the same fingerprint")
	}
	if of("a", &os.PathError{Op: "open", Path: "x", Err: os.ErrExist}) != of("a", &os.PathError{Op: "stat", Path: "y", Err: os.ErrExist}) {
		t.Error("errors of one type have several fingerprints")
	}
}

type panicker struct{ names []string }

// last panics in the next line for an empty list, whoever calls it.
func (p panicker) last() string {
	return p.names[len(p.names)-1]
}

func TestFingerprintOfPanic(t *testing.T) {
	t.Parallel()
	mux := inbox.NewMux()
	for name, fn := range map[string]func(){
		"out of range":         func() { _ = panicker{}.last() },
		"the same":             func() { _ = panicker{}.last() },
		"in the library":       func() { _ = strings.Repeat("x", -1) },
		"in the library again": func() { _ = strings.Repeat("x", -1) },
		"twice": func() {
			defer func() { panic(recover()) }()
			_ = panicker{}.last()
		},
	} {
		if err := inbox.Handle(mux, name, func(context.Context, struct{}) error { fn(); return nil }); err != nil {
			t.Fatal(err)
		}
	}
	of := func(name string) inbox.DeadLetter {
		m := &inbox.Message{ID: ids.New(), Name: name, Body: []byte("{}")}
		err := mux.Process(t.Context(), []*inbox.Message{m})[0]
		return driver.NewDeadLetter(m, driver.Classify(err), "billing", time.Now())
	}
	first := of("out of range")
	if first.ErrorType != "runtime.boundsError" {
		t.Errorf("type %q", first.ErrorType)
	}
	if same := of("the same"); same.Fingerprint != first.Fingerprint {
		t.Error("panics of one function under two messages have two fingerprints")
	}
	if twice := of("twice"); twice.Fingerprint != first.Fingerprint {
		t.Error("a panic that was passed on has another fingerprint")
	}
	other, again := of("in the library"), of("in the library again")
	if other.Fingerprint == first.Fingerprint || other.Fingerprint == again.Fingerprint {
		t.Error("the fingerprint is not of the function that called the library")
	}
}

func TestNewDeadLetter(t *testing.T) {
	t.Parallel()
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	m := &inbox.Message{ID: ids.New(), Name: "order.placed", Body: []byte(`{}`), Attempt: 1}
	m.Attempt = 6
	d := driver.NewDeadLetter(m, driver.Classify(errors.New("boom")), "billing", now)
	if d.Class != "default" || d.Attempts != 6 || d.Error != "boom" || d.Consumer != "billing" ||
		!d.FirstFailedAt.Equal(now) || !d.FailedAt.Equal(now) || d.Message.ID != m.ID {
		t.Errorf("dead letter = %+v", d)
	}
	m.FirstFailedAt = now.Add(-time.Hour)
	long := errors.New(strings.Repeat("ä", 1000) + "\xff")
	d = driver.NewDeadLetter(m, driver.Classify(long), "billing", now)
	if !d.FirstFailedAt.Equal(m.FirstFailedAt) || len(d.Error) > driver.MaxErrorBytes || !utf8.ValidString(d.Error) || !strings.HasSuffix(d.Error, "ä…") {
		t.Errorf("first failure %v, error of %d bytes %q", d.FirstFailedAt, len(d.Error), d.Error)
	}
}

func TestDeadLetterQueue(t *testing.T) {
	t.Parallel()
	if got := driver.DeadLetterQueue("", driver.ClassDefault); got != "failed.default" {
		t.Error(got)
	}
	if got := driver.DeadLetterQueue("shop.", "payment"); got != "shop.failed.payment" {
		t.Error(got)
	}
}

func TestProgressed(t *testing.T) {
	t.Parallel()
	begin := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	m := &inbox.Message{}
	for n := 1; n <= 30; n++ {
		f := driver.Classify(inbox.Recoverable(errors.New(strings.Repeat("ä", 200) + strconv.Itoa(n))))
		if n > 1 {
			f = driver.Classify(errors.New("boom " + strconv.Itoa(n)))
		}
		before := append([]inbox.FailedAttempt(nil), m.History...)
		p := driver.Progressed(m, f, driver.Decision{Counted: true, Recovered: n == 1}, "billing", begin.Add(time.Duration(n)*time.Second))
		if !reflect.DeepEqual(before, append([]inbox.FailedAttempt(nil), m.History...)) {
			t.Fatal("the message's own history was changed")
		}
		m.Attempt, m.Recovered, m.FirstFailedAt, m.History = p.Attempt, p.Recovered, p.FirstFailedAt, p.History
	}
	if m.Attempt != 31 || m.Recovered != 1 || !m.FirstFailedAt.Equal(begin.Add(time.Second)) || len(m.History) != driver.MaxHistory {
		t.Fatalf("after 30 failures: %+v", m)
	}
	for i, want := range []int{1, 2, 3, 4, 5, 26, 27, 28, 29, 30} {
		a := m.History[i]
		if !a.At.Equal(begin.Add(time.Duration(want)*time.Second)) || a.Consumer != "billing" || len(a.Error) > 200 || !utf8.ValidString(a.Error) {
			t.Errorf("entry %d is %+v, want failure %d", i, a, want)
		}
	}
	again := driver.Progressed(m, driver.Classify(inbox.Postpone(errors.New("not now"), 0)), driver.Decision{}, "billing", begin)
	if again.Attempt != 31 || len(again.History) != driver.MaxHistory || again.History[9].Error != "boom 30" {
		t.Errorf("a failure that does not count: %+v", again)
	}
}

func TestHistoryOnTheWire(t *testing.T) {
	t.Parallel()
	at := time.Date(2026, 1, 2, 3, 4, 5, 678, time.UTC)
	history := []inbox.FailedAttempt{{At: at, Error: "a <b> & \"c\"\n", Consumer: "billing"}, {At: at.Add(time.Second), Error: "d"}}
	if got := driver.DecodeHistory(driver.EncodeHistory(history)); !reflect.DeepEqual(got, history) {
		t.Errorf("read back %+v", got)
	}
	if text := driver.EncodeHistory(nil); text != "" {
		t.Errorf("no history is %q", text)
	}
	var long []inbox.FailedAttempt
	for range 2 * driver.MaxHistory {
		long = append(long, inbox.FailedAttempt{At: at, Error: strings.Repeat("\x01", 1000), Consumer: strings.Repeat("\x02", 1000)})
	}
	text := driver.EncodeHistory(long)
	if got := driver.DecodeHistory(text); len(text) > driver.MaxHistoryBytes || len(got) < 2 {
		t.Errorf("the longest history has %d bytes and %d entries", len(text), len(got))
	}
	for _, foreign := range []string{"", "x", "{}", "[1]", "null", "[[]]", strings.Repeat("[", 1<<20)} {
		if got := driver.DecodeHistory(foreign); len(got) != 0 {
			t.Errorf("%.20q is read as %+v", foreign, got)
		}
	}
	if got := driver.DecodeHistory(`[{"at":"yesterday","error":"x","more":1},null]`); len(got) != 2 || !got[0].At.IsZero() || got[0].Error != "x" {
		t.Errorf("half a history is read as %+v", got)
	}
}

// A history from outside is bounded, and its encoded form can be decoded again.
func FuzzHistory(f *testing.F) {
	f.Add(`[{"at":"2026-01-02T03:04:05Z","consumer":"c","error":"e"}]`)
	f.Fuzz(func(t *testing.T, text string) {
		history := driver.DecodeHistory(text)
		if len(history) > driver.MaxHistory {
			t.Fatalf("%d entries", len(history))
		}
		again := driver.EncodeHistory(history)
		if len(again) > driver.MaxHistoryBytes || len(history) > 0 && again == "" {
			t.Fatalf("%d entries become %d bytes", len(history), len(again))
		}
	})
}
