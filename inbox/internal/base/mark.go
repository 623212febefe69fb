// Package base holds what package inbox and package inbox/driver share: the markers of errors,
// classes, limits, and the message of a context.
package base

import (
	"errors"
	"time"
)

// Kind is what a marker says about an error.
type Kind int

// The kinds. Those after Unrecoverable rule errors that are joined with others, the last one most.
const (
	Unmarked Kind = iota
	Unrecoverable
	Recoverable
	Postponed
	Unavailable
)

// ErrUnavailable is inside every error that is marked Unavailable.
var ErrUnavailable = Mark(errors.New("inbox: unavailable"), Verdict{Kind: Unavailable})

// Verdict is what the markers of an error, or of a part of it, add up to.
type Verdict struct {
	Kind  Kind
	Class string        // "" = as the error inside says
	After time.Duration // 0 = as the policy says
}

// marked adds a verdict to an error without changing its text.
type marked struct {
	err     error
	verdict Verdict
}

func (e *marked) Error() string { return e.err.Error() }
func (e *marked) Unwrap() error { return e.err }

// Is makes errors.Is(err, ErrUnavailable) true.
func (e *marked) Is(target error) bool {
	return target == ErrUnavailable && e.verdict.Kind == Unavailable
}

// Mark adds a verdict to an error. Nil stays nil.
func Mark(err error, v Verdict) error {
	if err == nil {
		return nil
	}
	return &marked{err, v}
}

// Judge reads the markers of an error; driver.Classify has the rules.
func Judge(err error) Verdict {
	switch e := err.(type) {
	case *marked:
		return e.over(Judge(e.err))
	case interface{ Unwrap() []error }:
		return judgeAll(e.Unwrap())
	case interface{ Unwrap() error }:
		if inner := e.Unwrap(); inner != nil {
			return Judge(inner)
		}
	}
	return Verdict{}
}

// over lays the marker over the verdict of the error inside it.
func (e *marked) over(inner Verdict) Verdict {
	v := inner
	if e.verdict.Kind != Unmarked {
		v.Kind, v.After = e.verdict.Kind, e.verdict.After
	}
	if e.verdict.Class != "" {
		v.Class = e.verdict.Class
	}
	return v
}

func judgeAll(errs []error) Verdict {
	var verdicts []Verdict
	decides := Unmarked
	for _, err := range errs {
		if err == nil {
			continue
		}
		v := Judge(err)
		verdicts = append(verdicts, v)
		if v.Kind > Unrecoverable {
			decides = max(decides, v.Kind)
		}
	}
	if decides == Unmarked && allUnrecoverable(verdicts) {
		decides = Unrecoverable
	}
	joined := Verdict{Kind: decides}
	for _, v := range verdicts {
		if v.Kind != decides {
			continue
		}
		joined.After = max(joined.After, v.After)
		if joined.Class == "" {
			joined.Class = v.Class
		}
	}
	return joined
}

func allUnrecoverable(verdicts []Verdict) bool {
	for _, v := range verdicts {
		if v.Kind != Unrecoverable {
			return false
		}
	}
	return len(verdicts) > 0
}
