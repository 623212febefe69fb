package core

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"
)

// Finding is a missing or wrong setting with its fix, as the Check methods return it.
type Finding interface {
	error
	Fix() string
}

// FindingState is a finding of a part, for the status.
type FindingState struct {
	Part    string `json:"part"`
	Problem string `json:"problem"`
	Fix     string `json:"fix"`
}

const (
	// findingsEvery is the time between two checks for the status. RabbitMQ logs a line for each queue that is missing.
	findingsEvery = 5 * time.Minute
	// findingsTimeout bounds a check for the status. A part that takes longer has no findings there.
	findingsTimeout = 2 * time.Second
)

// findings returns the findings of the last check, which is at most findingsEvery old. They are no problems of the verdict: a
// setting that is wrong and harmful at once fails Ready, and others may be intended.
func (o *Operator) findings(ctx context.Context) []FindingState {
	return o.checked.within(findingsEvery, func() []FindingState {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), findingsTimeout) // others wait for it, too
		defer cancel()
		states := []FindingState{} // not null in JSON
		found, _ := o.Check(ctx)   // the status shows by other means that a server does not answer
		for _, f := range found {
			states = append(states, FindingState{f.Part, f.Problem(), f.Fix()})
		}
		return states
	})
}

// Found is a finding of a part.
type Found struct {
	Part string
	Finding
}

// Problem returns the text of a finding without its fix.
func (f Found) Problem() string { return strings.TrimSuffix(f.Error(), "; "+f.Fix()) }

// Check runs the checks of all parts at the same time. A relay also runs its outbox's check, so duplicates are removed.
func (o *Operator) Check(ctx context.Context) (found []Found, failed []error) {
	type result struct {
		findings []Finding
		failed   []error
	}
	parts := o.Parts()
	results := make([]result, len(parts))
	var checking sync.WaitGroup
	for i, p := range parts {
		if c, ok := p.Part.(interface{ Check(context.Context) error }); ok {
			checking.Go(func() { results[i].findings, results[i].failed = sortOut(c.Check(ctx), nil, nil) })
		}
	}
	checking.Wait()
	for i, r := range results {
		for _, f := range r.findings {
			found = append(found, Found{parts[i].Name, f})
		}
		for _, err := range r.failed {
			failed = append(failed, fmt.Errorf("%s: %w", parts[i].Name, err))
		}
	}
	return once(found), once(failed)
}

// sortOut appends the findings that err joins to found, and its other errors to failed.
func sortOut(err error, found []Finding, failed []error) ([]Finding, []error) {
	switch err := err.(type) {
	case nil:
	case Finding:
		found = append(found, err)
	case interface{ Unwrap() []error }:
		for _, single := range err.Unwrap() {
			found, failed = sortOut(single, found, failed)
		}
	default:
		if one, ok := errors.AsType[Finding](err); ok {
			return append(found, one), failed
		}
		failed = append(failed, err)
	}
	return found, failed
}

// once removes errors with the text of an earlier one.
func once[E error](all []E) []E {
	said := map[string]bool{}
	var left []E
	for _, e := range all {
		if !said[e.Error()] {
			said[e.Error()] = true
			left = append(left, e)
		}
	}
	return left
}
