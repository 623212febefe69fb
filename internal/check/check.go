// Package check makes what every Check returns: an error that joins the findings.
package check

import (
	"errors"
	"fmt"
)

// New returns one thing that an operator should mend. component names the package that looked, such
// as "outboxpgx", problem says what is missing or mis-set, and mend how to put it right: a statement,
// a setting or a command. The error's text is one line of all three, and its method Mend() string
// returns mend.
func New(component, problem, mend string) error { return &finding{component, problem, mend} }

type finding struct{ component, problem, mend string }

func (f *finding) Error() string { return f.component + ": " + f.problem + "; " + f.mend }

func (f *finding) Mend() string { return f.mend }

// Findings collects what one Check finds.
type Findings struct {
	// Component names the package that looks.
	Component string

	all []error
}

// Add adds a finding whose problem is formatted as by fmt.Sprintf.
func (f *Findings) Add(mend, problem string, args ...any) {
	f.all = append(f.all, New(f.Component, fmt.Sprintf(problem, args...), mend))
}

// Join adds what another look returned: findings, or why it failed. nil adds nothing.
func (f *Findings) Join(err error) {
	if err != nil {
		f.all = append(f.all, err)
	}
}

// Err returns what was added as one error, whose Unwrap() []error gives each singly. It returns nil
// if nothing was added.
func (f *Findings) Err() error { return errors.Join(f.all...) }
