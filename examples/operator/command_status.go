package operator

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
)

// clearScreen moves a terminal's cursor to the top and clears what is below.
const clearScreen = "\x1b[H\x1b[2J"

// status prints the state of everything on one screen.
func (o *Operator) status() *cobra.Command {
	cmd := &cobra.Command{Use: "status", Short: "Show the state of everything on one screen", Args: noArguments}
	var every seconds
	cmd.Flags().Var(&every, "watch", "show it again every so much `time`, until interrupted")
	cmd.Flags().Lookup("watch").NoOptDefVal = "2s"
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		ctx, out := cmd.Context(), cmd.OutOrStdout()
		var last status
		for {
			look := o.look
			if every == 0 {
				look = o.lookForRates
			}
			s := look(ctx)
			s.addRates(last)
			last = s
			if ctx.Err() != nil && every > 0 {
				return nil
			}
			var screen bytes.Buffer
			if every > 0 && isTerminal(out) && !wantsJSON(cmd) {
				screen.WriteString(clearScreen)
			}
			if err := o.printStatus(cmd, &screen, s); err != nil {
				return err
			}
			if _, err := out.Write(screen.Bytes()); err != nil {
				return err
			}
			if every == 0 {
				if failed := s.failed(); len(failed) > 0 {
					return errors.New(strings.Join(failed, "; "))
				}
				return nil
			}
			select {
			case <-ctx.Done():
				return nil
			case <-time.After(time.Duration(every)):
			}
		}
	}
	return cmd
}

func (o *Operator) printStatus(cmd *cobra.Command, w io.Writer, s status) error {
	if wantsJSON(cmd) {
		return printJSONTo(w, s)
	}
	fmt.Fprintf(w, "%s  %s\n", o.cfg.Program, moment(s.At))
	err := errors.Join(printOutboxes(w, s.Outboxes), printConsumers(w, s.Consumers), sweepTable(w, s.Sweeps).below(w),
		printWatched(w, s))
	paused := s.paused()
	if len(paused) > 0 {
		fmt.Fprintln(w)
	}
	for _, name := range slices.Sorted(maps.Keys(paused)) {
		p := paused[name]
		fmt.Fprintf(w, "%s is paused by %s since %s: %s\n", name, plain(p.By), moment(p.Since), plain(p.Reason))
	}
	if failed := s.failed(); len(failed) > 0 {
		fmt.Fprintln(w)
		for _, text := range failed {
			fmt.Fprintf(w, "! %s\n", plain(text))
		}
	}
	return err
}

func printOutboxes(w io.Writer, outboxes []outboxStatus) error {
	t := newTable(w, "OUTBOX", "READY", "PARKED", "DEAD", "OLDEST", "STORED/S", "LEFT/S", "LANES", "BREAKERS")
	for _, b := range outboxes {
		if b.Error != "" {
			t.row(b.Name, "?", "?", "?", "?", "?", "?", "?", "?")
			continue
		}
		t.row(b.Name, b.Ready, b.Parked, b.Dead, age(b.OldestAge), perSecond(b.StoredRate), perSecond(b.LeftRate), b.lanes(), b.breakers())
	}
	return t.below(w)
}

// perSecond is a rate in a column; "-": it cannot be told.
func perSecond(r *float64) string {
	if r == nil {
		return "-"
	}
	return rate(r)
}

// lanes are those that relays hold, and that one has lost.
func (s outboxStatus) lanes() string {
	if s.Doubtful == 0 {
		return fmt.Sprintf("%d held", s.Leased)
	}
	return fmt.Sprintf("%d held, %d doubtful", s.Leased, s.Doubtful)
}

// breakers are those of the transports of this process.
func (s outboxStatus) breakers() string {
	var all []string
	for _, t := range s.Transports {
		one := t.Name + " " + t.State
		if t.Window > 0 {
			one += ", window " + percent(t.Window)
		}
		if t.Error != "" {
			one += ": " + short(t.Error, 80)
		}
		all = append(all, one)
	}
	return cmp.Or(strings.Join(all, "; "), "of other processes")
}

func printConsumers(w io.Writer, consumers []consumerStatus) error {
	t := newTable(w, "CONSUMER", "WAITING", "RETRYING", "PUT OFF", "PROCESSED/S", "DEAD", "OF CLASS")
	for _, c := range consumers {
		if c.Error != "" {
			t.row(c.Name, "?", "?", "?", "?", "?", "")
			continue
		}
		dead, classes := 0, []string(nil)
		for _, class := range slices.Sorted(maps.Keys(c.Dead)) {
			if n := c.Dead[class]; n > 0 {
				dead += n
				classes = append(classes, fmt.Sprintf("%s %d", class, n))
			}
		}
		more := ""
		if c.Part {
			more = "+"
		}
		t.row(c.Name, c.Waiting, c.Retrying, c.PutOff, perSecond(c.Rate), fmt.Sprint(dead, more), strings.Join(classes, ", "))
	}
	return t.below(w)
}

// printWatched prints the limits, claims and connections that the service wants shown.
func printWatched(w io.Writer, s status) error {
	limits, claims := newTable(w, "LIMIT", "KEY", "MAX", "PER", "REMAINING", "MORE IN"), newTable(w, "KEYS", "IN FLIGHT")
	for _, l := range s.Limits {
		more := age(l.Reset)
		if l.Near() {
			more += ", near its edge"
		}
		limits.row(l.Limit, cmp.Or(l.Key, "all callers"), l.Max, age(l.Window), l.Remaining, more)
	}
	for _, c := range s.Claims {
		if c.Error != "" {
			claims.row(c.Part, "?")
			continue
		}
		claims.row(c.Part, c.Count())
	}
	connections := newTable(w, "SERVER", "ROLE", "PROGRAM", "CONNECTIONS")
	for _, c := range s.Connections {
		if c.Error != "" {
			connections.row(c.Server, "?", "?", "?")
			continue
		}
		for _, r := range c.Roles {
			connections.row(c.Server, r.Role, r.Program, sumUp(r))
		}
		connections.row(c.Server, "all", "", c.Total())
	}
	return errors.Join(limits.below(w), claims.below(w), connections.below(w))
}

func sweepTable(w io.Writer, sweeps []sweepStatus) *table {
	t := newTable(w, "SWEEP", "OVERDUE", "LAG", "NEXT", "UNDATED")
	for _, e := range sweeps {
		if e.Error != "" {
			t.row(e.Name, "?", "?", "?", "?")
			continue
		}
		next := "-"
		if e.Next != nil {
			next = "in " + age(*e.Next)
		}
		t.row(e.Name, e.Overdue, age(e.Lag), next, e.Undated)
	}
	return t
}

func age(seconds float64) string { return span(time.Duration(seconds * float64(time.Second))) }
