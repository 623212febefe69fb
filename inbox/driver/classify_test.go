package driver_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/internal/base"
)

func TestClassify(t *testing.T) {
	t.Parallel()
	boom := errors.New("boom")
	retry := driver.Failure{Class: "default", Action: driver.ActionRetry, Counted: true}
	dead := driver.Failure{Class: "unrecoverable", Action: driver.ActionDead, Counted: true}
	recoverable := retry
	recoverable.Unlimited = true
	after := func(f driver.Failure, d time.Duration) driver.Failure { f.After = d; return f }
	class := func(f driver.Failure, c string) driver.Failure { f.Class = c; return f }

	for name, tt := range map[string]struct {
		err  error
		want driver.Failure
	}{
		"nil":                        {nil, driver.Failure{}},
		"unmarked":                   {boom, retry},
		"deadline":                   {context.DeadlineExceeded, retry},
		"unrecoverable":              {inbox.Unrecoverable(boom), dead},
		"wrapped":                    {fmt.Errorf("a: %w", inbox.Unrecoverable(boom)), dead},
		"outermost wins":             {inbox.Recoverable(inbox.Unrecoverable(boom)), recoverable},
		"outermost wins, reversed":   {inbox.Unrecoverable(inbox.RetryAfter(boom, time.Second)), dead},
		"retry after":                {inbox.RetryAfter(boom, time.Minute), after(recoverable, time.Minute)},
		"invalid":                    {inbox.Invalid(boom), class(dead, "validation")},
		"own class":                  {inbox.Classed(boom, "payment"), class(retry, "payment")},
		"own class, dead":            {inbox.Classed(inbox.Unrecoverable(boom), "payment"), class(dead, "payment")},
		"own class inside":           {inbox.Unrecoverable(inbox.Classed(boom, "payment")), class(dead, "payment")},
		"impossible class":           {inbox.Classed(boom, "No Class"), retry},
		"panic":                      {&base.Panic{Value: "x"}, retry},
		"panic with an error":        {&base.Panic{Value: inbox.Unrecoverable(boom)}, dead},
		"joined: any recoverable":    {errors.Join(inbox.Unrecoverable(boom), boom, inbox.RetryAfter(boom, 2), inbox.RetryAfter(boom, 3)), after(recoverable, 3)},
		"joined: all unrecoverable":  {errors.Join(inbox.Unrecoverable(boom), inbox.Invalid(boom)), class(dead, "validation")},
		"joined: some unrecoverable": {errors.Join(inbox.Unrecoverable(boom), boom), retry},
		"joined: nested":             {errors.Join(boom, fmt.Errorf("%w, %w", boom, inbox.Recoverable(boom))), recoverable},
		"joined inside a marker":     {inbox.Unrecoverable(errors.Join(boom, inbox.Recoverable(boom))), dead},
		"postponed":                  {inbox.Postpone(boom, 7), driver.Failure{Class: "default", Action: driver.ActionRetry, After: 7, Unlimited: true}},
		"unavailable":                {inbox.Unavailable(boom), driver.Failure{Class: "default", Action: driver.ActionReturn, Unavailable: true}},
		"unavailable, the sentinel":  {fmt.Errorf("a: %w", driver.ErrUnavailable), driver.Failure{Class: "default", Action: driver.ActionReturn, Unavailable: true}},
		"joined: unavailable":        {errors.Join(inbox.Unrecoverable(boom), inbox.Unavailable(boom)), driver.Failure{Class: "default", Action: driver.ActionReturn, Unavailable: true}},
		"draining":                   {inbox.Unrecoverable(fmt.Errorf("x: %w", inbox.ErrDraining)), driver.Failure{Class: "default", Action: driver.ActionReturn}},
	} {
		got := driver.Classify(tt.err)
		if !errors.Is(got.Err, tt.err) {
			t.Errorf("%s: Err = %v", name, got.Err)
		}
		got.Err = nil
		if got != tt.want {
			t.Errorf("%s: %+v, want %+v", name, got, tt.want)
		}
	}
}

type brokenError struct{ inner error }

func (e *brokenError) Error() string { return "broken: " + e.inner.Error() }
func (e *brokenError) Unwrap() error { return e.inner }

// A nil pointer that became an error is one message's failure, not the consumer's end.
func TestClassifyBrokenError(t *testing.T) {
	t.Parallel()
	var broken *brokenError
	for _, err := range []error{broken, inbox.Unrecoverable(broken), errors.Join(inbox.ErrDraining, broken), &base.Panic{Value: broken}} {
		f := driver.Classify(err)
		if f.Class != driver.ClassDefault || f.Action != driver.ActionRetry || !f.Counted {
			t.Errorf("%T: %+v", err, f)
		}
		if letter := driver.NewDeadLetter(&inbox.Message{}, f, "c", time.Time{}); letter.Error == "" {
			t.Errorf("%T: the dead letter tells no error", err)
		}
	}
}

func TestMarkersKeepTheError(t *testing.T) {
	t.Parallel()
	boom := errors.New("boom")
	for name, err := range map[string]error{
		"Unrecoverable": inbox.Unrecoverable(boom), "Recoverable": inbox.Recoverable(boom), "Invalid": inbox.Invalid(boom),
		"RetryAfter": inbox.RetryAfter(boom, 1), "Postpone": inbox.Postpone(boom, 1), "Unavailable": inbox.Unavailable(boom),
		"Classed": inbox.Classed(boom, "x"),
	} {
		if err.Error() != "boom" || !errors.Is(err, boom) {
			t.Errorf("%s: %v", name, err)
		}
		if errors.Is(err, driver.ErrUnavailable) != (name == "Unavailable") {
			t.Errorf("%s: ErrUnavailable = %v", name, errors.Is(err, driver.ErrUnavailable))
		}
	}
	for name, err := range map[string]error{
		"Unrecoverable": inbox.Unrecoverable(nil), "Recoverable": inbox.Recoverable(nil), "Invalid": inbox.Invalid(nil),
		"RetryAfter": inbox.RetryAfter(nil, 1), "Postpone": inbox.Postpone(nil, 1), "Unavailable": inbox.Unavailable(nil),
		"Classed": inbox.Classed(nil, "x"),
	} {
		if err != nil {
			t.Errorf("%s(nil) = %v", name, err)
		}
	}
}

func TestValidClass(t *testing.T) {
	t.Parallel()
	for class, want := range map[string]bool{
		"default": true, "a.b-c_9": true, strings.Repeat("x", 64): true,
		"": false, "A": false, "a b": false, "ä": false, strings.Repeat("x", 65): false,
	} {
		if driver.ValidClass(class) != want {
			t.Errorf("ValidClass(%q) = %v", class, !want)
		}
	}
}
