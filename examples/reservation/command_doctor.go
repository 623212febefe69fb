package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/holdfast-go/holdfast/expiry"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
)

const doctorTimeout = 30 * time.Second

// findingsAlike is how many findings with the same mend are printed one by one.
const findingsAlike = 2

// examination is what doctor looks at on one server.
type examination struct {
	server string
	// reach tells whether the server can be asked at all.
	reach  func(context.Context) error
	checks []func(context.Context) ([]expiry.Finding, error)
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
	type check = func(context.Context) ([]expiry.Finding, error)
	checkInbox := func(ctx context.Context) ([]expiry.Finding, error) {
		return inboxpgx.Check(ctx, p.servers.workers, inboxpgx.PruneConfig{})
	}
	return []examination{
		{"Postgres", p.servers.workers.Ping, []check{
			p.transactor.Check, p.source.Check, p.listener.Check, checkInbox, p.records.Check, p.holds.Check,
		}},
		{"Redis", p.servers.pingRedis, []check{p.keys.Check, p.limiter.Check}},
		{"RabbitMQ", p.servers.pingRabbitMQ, []check{p.publisher.Check, p.consumer.Check}},
	}
}

// run asks every check; a server that cannot be reached is one error, not one for each.
func (e examination) run(ctx context.Context) ([]expiry.Finding, error) {
	if err := e.reach(ctx); err != nil {
		return nil, fmt.Errorf("%s cannot be asked: %w", e.server, err)
	}
	var all []expiry.Finding
	var errs []error
	for _, check := range e.checks {
		findings, err := check(ctx)
		all = append(all, findings...)
		errs = append(errs, err)
	}
	return all, errors.Join(errs...)
}

// printFindings prints findings with the same mend together, and of many the first ones.
func printFindings(w io.Writer, findings []expiry.Finding) {
	type kind struct{ component, mend string }
	problems := map[kind][]string{}
	var kinds []kind
	for _, f := range findings {
		k := kind{f.Component, f.Mend}
		if problems[k] == nil {
			kinds = append(kinds, k)
		}
		problems[k] = append(problems[k], f.Problem)
	}
	for _, k := range kinds {
		alike := problems[k]
		for _, problem := range alike[:min(len(alike), findingsAlike)] {
			fmt.Fprintf(w, "%s: %s\n", k.component, problem)
		}
		if more := len(alike) - findingsAlike; more > 0 {
			fmt.Fprintf(w, "%s: and %d more\n", k.component, more)
		}
		fmt.Fprintf(w, "\tmend: %s\n", k.mend)
	}
}
