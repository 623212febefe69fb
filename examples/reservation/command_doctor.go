package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"
)

const doctorTimeout = 30 * time.Second

// findingsAlike is how many findings with the same mend are printed one by one.
const findingsAlike = 2

// finding is one thing to mend, as the Check methods return it.
type finding interface {
	error
	Mend() string
}

// runDoctor prints what the packages find amiss; it changes nothing.
func runDoctor(ctx context.Context, c *commandContext, args []string) (int, error) {
	if err := parseFlags(c, newFlagSet("doctor"), args); err != nil {
		return exitUsage, err
	}
	ctx, cancel := context.WithTimeout(ctx, doctorTimeout)
	defer cancel()
	if err := c.parts.servers.reach(ctx); err != nil {
		return exitFailed, err // one for each server, not one for each check
	}
	var found []finding
	var failed []error
	for _, check := range c.parts.checks() {
		found, failed = sortOut(check(ctx), found, failed)
	}
	printFindings(c.stdout, found)
	if err := errors.Join(failed...); err != nil {
		return exitFailed, err
	}
	if len(found) > 0 {
		fmt.Fprintf(c.stdout, "findings: %d; the command migrate creates what does not exist\n", len(found))
		return exitFailed, nil
	}
	fmt.Fprintln(c.stdout, "all is well")
	return exitOK, nil
}

// sortOut appends the findings that err joins, and the errors that are none.
func sortOut(err error, found []finding, failed []error) ([]finding, []error) {
	switch err := err.(type) {
	case nil:
	case finding:
		found = append(found, err)
	case interface{ Unwrap() []error }:
		for _, single := range err.Unwrap() {
			found, failed = sortOut(single, found, failed)
		}
	default:
		failed = append(failed, err)
	}
	return found, failed
}

// printFindings prints findings with the same mend together, and of many the first ones.
func printFindings(w io.Writer, findings []finding) {
	type kind struct{ component, mend string }
	problems := map[kind][]string{}
	var kinds []kind
	for _, f := range findings {
		problem := strings.TrimSuffix(f.Error(), "; "+f.Mend())
		component, _, _ := strings.Cut(problem, ":")
		k := kind{component, f.Mend()}
		if problems[k] == nil {
			kinds = append(kinds, k)
		}
		problems[k] = append(problems[k], problem)
	}
	for _, k := range kinds {
		alike := problems[k]
		for _, problem := range alike[:min(len(alike), findingsAlike)] {
			fmt.Fprintln(w, problem)
		}
		if more := len(alike) - findingsAlike; more > 0 {
			fmt.Fprintf(w, "%s: and %d more\n", k.component, more)
		}
		fmt.Fprintf(w, "\tmend: %s\n", k.mend)
	}
}
