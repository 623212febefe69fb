package driver_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/internal/ids"
)

// refusal is an error as a database's client has them.
type refusal struct{ code string }

func (e *refusal) Error() string    { return "refused with " + e.code }
func (e *refusal) SQLState() string { return e.code }

// given is the dead letter of a message of that name whose handler failed with err.
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
		"plain":                  {errors.New("boom"), "*errors.errorString", ""},
		"wrapped":                {fmt.Errorf("read: %w", missing), "*fs.PathError", ""},
		"marked":                 {inbox.Classed(inbox.Unrecoverable(missing), "files"), "*fs.PathError", ""},
		"joined":                 {errors.Join(nil, missing, errors.New("boom")), "*fs.PathError", ""},
		"a server's":             {fmt.Errorf("insert: %w", &refusal{"23505"}), "*driver_test.refusal", "23505"},
		"behind another":         {errors.Join(missing, &refusal{"40001"}), "*fs.PathError", "40001"},
		"whose state is no such": {&refusal{"23505; DROP"}, "*driver_test.refusal", ""},
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

// last panics one line below for an empty list, wherever it is called from.
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
