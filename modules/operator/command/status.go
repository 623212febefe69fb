package command

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

	"github.com/holdfast-go/holdfast/modules/operator"
	"github.com/holdfast-go/holdfast/modules/operator/internal/core"
)

func sumUp(c operator.Connections) string {
	return fmt.Sprintf("%d active, %d in a transaction, %d idle", c.Active, c.Waiting, c.Idle)
}

// clearScreen moves a terminal's cursor to the top and clears what is below.
const clearScreen = "\x1b[H\x1b[2J"

// status prints the state of everything on one screen.
func (o *commands) status() *cobra.Command {
	cmd := &cobra.Command{Use: "status", Short: "Show the state of everything on one screen", Args: noArguments}
	var every seconds
	cmd.Flags().Var(&every, "watch", "show it again every so much `time`, until interrupted")
	cmd.Flags().Lookup("watch").NoOptDefVal = "2s"
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		ctx, out := cmd.Context(), cmd.OutOrStdout()
		var last core.Status
		for {
			look := o.Look
			if every == 0 {
				look = o.LookForRates
			}
			s := look(ctx)
			s.AddRates(last)
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
				if failed := s.Failures(); len(failed) > 0 {
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

func (o *commands) printStatus(cmd *cobra.Command, w io.Writer, s core.Status) error {
	if wantsJSON(cmd) {
		return printJSONTo(w, s)
	}
	fmt.Fprintf(w, "%s  %s\n", o.Config.Program, core.Moment(s.At))
	err := errors.Join(printOutboxes(w, s.Outboxes), printConsumers(w, s.Consumers), sweepTable(w, s.Sweeps).below(w),
		printWatched(w, s))
	paused := s.Paused()
	if len(paused) > 0 {
		fmt.Fprintln(w)
	}
	for _, name := range slices.Sorted(maps.Keys(paused)) {
		p := paused[name]
		fmt.Fprintf(w, "%s is paused by %s since %s: %s\n", name, core.Plain(p.By), core.Moment(p.Since), core.Plain(p.Reason))
	}
	if failed := s.Failures(); len(failed) > 0 {
		fmt.Fprintln(w)
		for _, text := range failed {
			fmt.Fprintf(w, "! %s\n", core.Plain(text))
		}
	}
	return err
}

func printOutboxes(w io.Writer, outboxes []core.OutboxStatus) error {
	t := newTable(w, "OUTBOX", "READY", "PARKED", "DEAD", "OLDEST", "STORED/S", "LEFT/S", "LANES", "BREAKERS")
	for _, b := range outboxes {
		if b.Error != "" {
			t.row(b.Name, "?", "?", "?", "?", "?", "?", "?", "?")
			continue
		}
		t.row(b.Name, b.Ready, b.Parked, b.Dead, core.Age(b.OldestAge), perSecond(b.StoredRate), perSecond(b.LeftRate), lanes(b), breakers(b))
	}
	return t.below(w)
}

// perSecond is a rate in a column; "-": it cannot be told.
func perSecond(r *float64) string {
	if r == nil {
		return "-"
	}
	return core.Rate(r)
}

// lanes are those that relays hold, and that one has lost.
func lanes(s core.OutboxStatus) string {
	if s.Doubtful == 0 {
		return fmt.Sprintf("%d held", s.Leased)
	}
	return fmt.Sprintf("%d held, %d doubtful", s.Leased, s.Doubtful)
}

// breakers are those of the transports of this process.
func breakers(s core.OutboxStatus) string {
	var all []string
	for _, t := range s.Transports {
		one := t.Name + " " + t.State
		if t.Window > 0 {
			one += ", window " + core.Percent(t.Window)
		}
		if t.Error != "" {
			one += ": " + core.Short(t.Error, 80)
		}
		all = append(all, one)
	}
	return cmp.Or(strings.Join(all, "; "), "of other processes")
}

func printConsumers(w io.Writer, consumers []core.ConsumerStatus) error {
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
func printWatched(w io.Writer, s core.Status) error {
	limits, claims := newTable(w, "LIMIT", "KEY", "MAX", "PER", "REMAINING", "MORE IN"), newTable(w, "KEYS", "IN FLIGHT")
	for _, l := range s.Limits {
		more := core.Age(l.Reset)
		if l.Near() {
			more += ", near its edge"
		}
		limits.row(l.Limit, cmp.Or(l.Key, "all callers"), l.Max, core.Age(l.Window), l.Remaining, more)
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

func sweepTable(w io.Writer, sweeps []core.SweepStatus) *table {
	t := newTable(w, "SWEEP", "OVERDUE", "LAG", "NEXT", "UNDATED")
	for _, e := range sweeps {
		if e.Error != "" {
			t.row(e.Name, "?", "?", "?", "?")
			continue
		}
		next := "-"
		if e.Next != nil {
			next = "in " + core.Age(*e.Next)
		}
		t.row(e.Name, e.Overdue, core.Age(e.Lag), next, e.Undated)
	}
	return t
}
