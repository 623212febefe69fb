// Package check builds the error that every Check method returns: it joins the findings.
package check

import (
	"errors"
	"fmt"
)

// New returns one finding for an operator to fix. component names the package that checked, such as
// "outboxpgx". problem describes the missing or misconfigured thing. mend is the fix: a statement, a
// setting or a command. The error's text is one line of all three, and its method Mend() string
// returns mend.
func New(component, problem, mend string) error { return &finding{component, problem, mend} }

type finding struct{ component, problem, mend string }

func (f *finding) Error() string { return f.component + ": " + f.problem + "; " + f.mend }

func (f *finding) Mend() string { return f.mend }

// Findings collects the findings of one Check.
type Findings struct {
	// Component names the package that checks.
	Component string

	all []error
}

// Add adds a finding whose problem is formatted as by fmt.Sprintf.
func (f *Findings) Add(mend, problem string, args ...any) {
	f.all = append(f.all, New(f.Component, fmt.Sprintf(problem, args...), mend))
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
