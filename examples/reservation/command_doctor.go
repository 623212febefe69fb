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

// check is a Check method: nil, or an error that joins findings and failures to look.
type check = func(context.Context) error

// finding is one thing to mend, as the Check methods return it.
type finding interface {
	error
	Mend() string
}

// examination is what doctor looks at on one server.
type examination struct {
	server string
	// reach tells whether the server can be asked at all.
	reach  func(context.Context) error
	checks []check
}

// runDoctor prints what the packages find amiss; it changes nothing.
func runDoctor(ctx context.Context, c *commandContext, args []string) (int, error) {
	if err := parseFlags(c, newFlagSet("doctor"), args); err != nil {
		return exitUsage, err
	}
	ctx, cancel := context.WithTimeout(ctx, doctorTimeout)
	defer cancel()
	var errs []error
	found := 0
	for _, e := range c.parts.examinations() {
		findings, err := e.run(ctx)
		errs = append(errs, err)
		found += len(findings)
		printFindings(c.stdout, findings)
	}
	if err := errors.Join(errs...); err != nil {
		return exitFailed, err
	}
	if found > 0 {
		fmt.Fprintf(c.stdout, "findings: %d; the command migrate creates what does not exist\n", found)
		return exitFailed, nil
	}
	fmt.Fprintln(c.stdout, "all is well")
	return exitOK, nil
}

func (p *parts) examinations() []examination {
	return []examination{
		{"Postgres", p.servers.workers.Ping, []check{
			p.transactor.Check, p.messages.Check, p.once.Check, p.sweeper.Check,
		}},
		{"Redis", p.servers.pingRedis, []check{p.gate.Check, p.limiter.Check}},
		{"RabbitMQ", p.servers.pingRabbitMQ, []check{p.publisher.Check, p.consumer.Check}},
	}
}

// run asks every check; a server that cannot be reached is one error, not one for each.
func (e examination) run(ctx context.Context) (found []finding, err error) {
	if err := e.reach(ctx); err != nil {
		return nil, fmt.Errorf("%s cannot be asked: %w", e.server, err)
	}
	var failed []error
	for _, look := range e.checks {
		found, failed = sortOut(look(ctx), found, failed)
	}
	return found, errors.Join(failed...)
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
