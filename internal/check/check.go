// Package check builds the error that every Check method returns: it joins the findings.
package check

import (
	"errors"
	"fmt"
)

// New returns one finding for an operator to fix. component names the package that checked, such as
// "outboxpgx". problem describes the missing or misconfigured thing. fix is the fix: a statement, a
// setting or a command. The error's text is one line of all three, and its method Fix() string
// returns fix.
func New(component, problem, fix string) error { return &finding{component, problem, fix} }

type finding struct{ component, problem, fix string }

func (f *finding) Error() string { return f.component + ": " + f.problem + "; " + f.fix }

func (f *finding) Fix() string { return f.fix }

// Findings collects the findings of one Check.
type Findings struct {
	// Component names the package that checks.
	Component string

	all []error
}

// Add adds a finding whose problem is formatted as by fmt.Sprintf.
func (f *Findings) Add(fix, problem string, args ...any) {
	f.all = append(f.all, New(f.Component, fmt.Sprintf(problem, args...), fix))
}

// Join adds the result of another check: its findings, or the error that stopped it. nil adds
// nothing.
func (f *Findings) Join(err error) {
	if err != nil {
		f.all = append(f.all, err)
	}
}

// Err returns all findings as one error, whose Unwrap() []error returns them one by one. It returns
// nil if there are none.
func (f *Findings) Err() error { return errors.Join(f.all...) }
