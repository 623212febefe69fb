package command

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"github.com/holdfast-go/holdfast/modules/operator/internal/core"
)

const (
	doctorTimeout = 30 * time.Second
	// pingTimeout leaves doctor the time to look at the servers that answer.
	pingTimeout = doctorTimeout / 3
	// findingsAlike is how many findings with the same mend are printed one by one.
	findingsAlike = 2
)

// finding is one thing to mend, as the Check methods return it.
type finding interface {
	error
	Mend() string
}

// doctor prints what the packages find amiss; it changes nothing.
func (o *commands) doctor() *cobra.Command {
	cmd := &cobra.Command{
		Use: "doctor", Short: "Look for what is missing or mis-set on the servers", Args: noArguments,
		Long: "Look for what is missing or mis-set on the servers. It changes nothing, and exits with 1 when there is something to mend.",
	}
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		ctx, cancel := context.WithTimeout(cmd.Context(), doctorTimeout)
		defer cancel()
		var found []finding
		var failed []error
		if err := o.reach(ctx); err != nil {
			failed = append(failed, err) // one for each server, not one for each check
		} else {
			found, failed = o.check(ctx)
		}
		if err := errors.Join(append(failed, printFindings(cmd, found, len(failed) == 0))...); err != nil {
			return err
		}
		if len(found) > 0 {
			return &exitError{code: exitFailed}
		}
		return nil
	}
	return cmd
}

// check asks all parts. A relay's check is its outbox's, too: what is said twice is kept once.
func (o *commands) check(ctx context.Context) (found []finding, failed []error) {
	for _, p := range o.Parts() {
		c, ok := p.Part.(interface{ Check(context.Context) error })
		if !ok {
			continue
		}
		findings, errs := sortOut(c.Check(ctx), nil, nil)
		found = append(found, findings...)
		for _, err := range errs {
			failed = append(failed, fmt.Errorf("%s: %w", p.Name, err))
		}
	}
	return once(found), once(failed)
}

// reach returns an error for each server that does not answer.
func (o *commands) reach(ctx context.Context) error {
	errs := make([]error, len(o.Config.Servers))
	var asking sync.WaitGroup
	for i, s := range o.Config.Servers {
		asking.Go(func() {
			ctx, cancel := context.WithTimeout(ctx, pingTimeout)
			defer cancel()
			if err := s.Ping(ctx); err != nil {
				errs[i] = fmt.Errorf("%s cannot be asked: %w", s.Name, err)
			}
		})
	}
	asking.Wait()
	return errors.Join(errs...)
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
		if one, ok := errors.AsType[finding](err); ok {
			return append(found, one), failed
		}
		failed = append(failed, err)
	}
	return found, failed
}

// once leaves out what is said a second time.
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

// printFindings prints what was found; whole says that nothing kept from looking.
func printFindings(cmd *cobra.Command, findings []finding, whole bool) error {
	if wantsJSON(cmd) {
		type one struct {
			Problem string `json:"problem"`
			Mend    string `json:"mend"`
		}
		all := []one{}
		for _, f := range findings {
			all = append(all, one{problem(f), f.Mend()})
		}
		return printJSON(cmd, all)
	}
	if len(findings) == 0 {
		if whole {
			fmt.Fprintln(cmd.OutOrStdout(), "all is well")
		}
		return nil
	}
	printAlike(cmd.OutOrStdout(), findings)
	fmt.Fprintf(cmd.OutOrStdout(), "findings: %d; the command setup creates what does not exist\n", len(findings))
	return nil
}

// problem is what is wrong, without its mend.
func problem(f finding) string { return strings.TrimSuffix(f.Error(), "; "+f.Mend()) }

// printAlike prints findings with the same mend together, and of many the first ones.
func printAlike(w io.Writer, findings []finding) {
	type kind struct{ component, mend string }
	problems := map[kind][]string{}
	var kinds []kind
	for _, f := range findings {
		component, _, _ := strings.Cut(problem(f), ":")
		k := kind{component, f.Mend()}
		if problems[k] == nil {
			kinds = append(kinds, k)
		}
		problems[k] = append(problems[k], problem(f))
	}
	for _, k := range kinds {
		alike := problems[k]
		for _, problem := range alike[:min(len(alike), findingsAlike)] {
			fmt.Fprintln(w, core.Plain(problem))
		}
		if more := len(alike) - findingsAlike; more > 0 {
			fmt.Fprintf(w, "%s: and %d more\n", k.component, more)
		}
		fmt.Fprintf(w, "\tmend: %s\n", core.Plain(k.mend))
	}
}
