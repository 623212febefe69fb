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

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/modules/operator"
	"github.com/holdfast-go/holdfast/modules/operator/internal/core"
	"github.com/holdfast-go/holdfast/ratelimit"
)

func sumUp(c operator.Connections) string {
	return fmt.Sprintf("%d active, %d in a transaction, %d idle", c.Active, c.Waiting, c.Idle)
}

// clearScreen moves a terminal's cursor to the top and clears everything below.
const clearScreen = "\x1b[H\x1b[2J"

// status prints the state of everything on one screen.
func (o *commands) status() *cobra.Command {
	cmd := &cobra.Command{Use: "status", Short: "Show the state of everything on one screen", Args: noArguments,
		Long: "Show the state of everything on one screen. The first line says whether a person is needed. It exits with 1 if so, except\nwith --watch.",
	}
	var every seconds
	cmd.Flags().Var(&every, "watch", "repeat at this `interval`, until interrupted")
	cmd.Flags().Lookup("watch").NoOptDefVal = "2s"
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		ctx, out := cmd.Context(), cmd.OutOrStdout()
		var last core.Status
		for {
			read := o.ReadStatus
			if every == 0 {
				read = o.ReadStatusWithRates
			}
			s := read(ctx)
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
				if !s.Verdict.Good {
					return &exitError{code: exitFailed}
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
	printVerdict(w, s)
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
	return err
}

// printVerdict prints the verdict, and each problem with its age and alert.
func printVerdict(w io.Writer, s core.Status) {
	fmt.Fprintf(w, "%s  %s\n", s.Verdict.Headline(), core.Moment(s.At))
	runbooks := false
	for _, p := range s.Verdict.Problems {
		line := p.String()
		if !p.Since.IsZero() {
			line += ", for " + core.Lasting(s.At.Sub(p.Since).Seconds())
		}
		if alerts := p.Alerts(); len(alerts) > 0 {
			names := core.Mapped(alerts, func(a core.Problem) string { return a.Alert })
			line, runbooks = line+" ("+strings.Join(names, ", ")+")", true
		}
		if p.Reason != "" {
			line += ": " + core.Short(p.Reason, 160)
		}
		fmt.Fprintf(w, "! %s\n", core.Plain(line))
	}
	if runbooks {
		fmt.Fprintf(w, "Runbooks: %s\n", core.Runbooks)
	}
	if n := len(s.Findings); n > 0 {
		fmt.Fprintf(w, "Settings to fix: %d, shown by the command doctor\n", n)
	}
}

func printOutboxes(w io.Writer, outboxes []core.OutboxStatus) error {
	t := newTable(w, "OUTBOX", "READY", "PARKED", "DEAD", "OLDEST", "STORED/S", "LEFT/S", "LANES", "BREAKERS")
	for _, b := range outboxes {
		if b.Error != "" {
			t.row(b.Name, unmeasured, unmeasured, unmeasured, unmeasured, unmeasured, unmeasured, unmeasured, unmeasured)
			continue
		}
		t.row(b.Name, b.Ready, b.Parked, b.Dead, core.Age(b.OldestAge), perSecond(b.StoredRate), perSecond(b.LeftRate), lanes(b), breakers(b))
	}
	return t.below(w)
}

// unmeasured stands for a figure that is unknown.
const unmeasured = "–"

// perSecond formats a rate for a column.
func perSecond(r *float64) string {
	if r == nil {
		return unmeasured
	}
	return core.Rate(r)
}

// lanes formats the number of lanes that relays hold, and of those whose last lease was lost.
func lanes(s core.OutboxStatus) string {
	if s.Doubtful == 0 {
		return fmt.Sprintf("%d held", s.Leased)
	}
	return fmt.Sprintf("%d held, %d doubtful", s.Leased, s.Doubtful)
}

// breakers formats the state of this process's transports.
func breakers(s core.OutboxStatus) string {
	var all []string
	for _, t := range s.Transports {
		one := t.Name + " " + t.Breaker()
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
			t.row(c.Name, unmeasured, unmeasured, unmeasured, unmeasured, unmeasured, "")
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

// printWatched prints the limits, claims and connections that the service configures.
func printWatched(w io.Writer, s core.Status) error {
	limits, claims := newTable(w, "LIMIT", "KEY", "MAX", "PER", "REMAINING", "MORE IN"), newTable(w, "KEYS", "IN FLIGHT")
	for _, l := range s.Limits {
		more := core.Age(l.Reset)
		if l.Near() {
			more += ", nearly used up"
		}
		limits.row(l.Limit, cmp.Or(l.Key, "all callers"), l.Max, core.Age(l.Window), l.Remaining, more)
	}
	for _, c := range s.Claims {
		if c.Error != "" {
			claims.row(c.Part, unmeasured)
			continue
		}
		claims.row(c.Part, c.Count())
	}
	connections := newTable(w, "SERVER", "ROLE", "PROGRAM", "CONNECTIONS")
	for _, c := range s.Connections {
		if c.Error != "" {
			connections.row(c.Server, unmeasured, unmeasured, unmeasured)
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
			t.row(e.Name, unmeasured, unmeasured, unmeasured, unmeasured)
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

// running lists the processes of the service and their slowest messages.
func (o *commands) running() *cobra.Command {
	cmd := &cobra.Command{Use: "running", Short: "List the processes of the service and the slowest messages in work", Args: noArguments,
		Long: "List the processes of the service and the slowest messages in work. Each process with a recorder of the history reports\n" +
			"every 10 s. One that has not reported for 30 s is gone.",
	}
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		r, err := o.Running(cmd.Context())
		if err != nil {
			return fmt.Errorf("running: %w", err)
		}
		if wantsJSON(cmd) {
			return printJSON(cmd, r)
		}
		return printRunning(cmd.OutOrStdout(), r)
	}
	return cmd
}

func printRunning(w io.Writer, r core.Running) error {
	age := func(at time.Time) string {
		if at.IsZero() {
			return "-"
		}
		return core.Age(r.At.Sub(at).Seconds())
	}
	processes := newTable(w, "PROCESS", "RUNS", "VERSION", "UP", "IN WORK", "OLDEST", "SEEN")
	for _, p := range r.Processes {
		seen := age(p.Seen) + " ago"
		if p.Gone {
			processes.row(p.Name(), strings.Join(p.Roles, ", "), p.Version, age(p.Since), "-", "-", "gone, "+seen)
			continue
		}
		processes.row(p.Name(), strings.Join(p.Roles, ", "), p.Version, age(p.Since), p.InWork, age(p.Oldest), seen)
	}
	messages := newTable(w, "AGE", "NAME", "CONSUMER", "KEY", "ATTEMPT", "PROCESS", "ID")
	for _, m := range r.Slowest {
		passed := age(m.Since)
		if m.Late {
			passed += ", too long"
		}
		messages.row(passed, m.Name, m.Consumer, core.Short(m.Key, 40), m.Attempt, m.Process, m.ID)
	}
	err := errors.Join(processes.flush(), messages.below(w))
	if versions := r.Versions(); len(versions) > 1 {
		fmt.Fprintf(w, "\n%d versions run at once: %s\n", len(versions), core.Plain(strings.Join(versions, ", ")))
	}
	return err
}

// idempotency shows the state of a key.
func (o *commands) idempotency() *cobra.Command {
	return parent("idempotency", "State of an idempotency key", o.idempotencyShow())
}

func (o *commands) idempotencyShow() *cobra.Command {
	cmd := &cobra.Command{
		Use: "show KEY", Short: "Show whether a key is free, in flight or done", Args: oneKey,
		Long: "Show for each part whether a key is free, in flight or done, since when, and for how long. Give the key as the client\n" +
			"sent it. If the service keeps it in a scope, such as a tenant or a user, set --scope: otherwise it is another key.",
	}
	scope := cmd.Flags().String("scope", "", "the `scope` in which the service keeps the key")
	body := cmd.Flags().Bool("body", false, "also show the stored answer")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		key, err := idempotency.ParseOpaque(args[0])
		if err != nil {
			return core.Mistakef("idempotency show: not a key: want 1 to 255 visible characters")
		}
		if *scope != "" {
			key = key.In(*scope)
		}
		found, failed := o.ReadKey(cmd.Context(), driver.Key(key), *body)
		if len(found) == 0 && failed == nil {
			return core.Mistakef("idempotency show: there is no store of idempotency keys")
		}
		return errors.Join(printKnown(cmd, found), failed)
	}
	return cmd
}

func printKnown(cmd *cobra.Command, all []core.KnownKey) error {
	if wantsJSON(cmd) {
		return printJSON(cmd, all)
	}
	t := newTable(cmd.OutOrStdout(), "PART", "STATE", "SINCE", "ENDS IN", "STATUS", "BYTES", "FINGERPRINT")
	for _, k := range all {
		if k.State == core.KeyStates[0] {
			t.row(k.Part, k.State, "-", "-", "-", "-", "-")
			continue
		}
		ends, status := "-", "-"
		if k.Left > 0 {
			ends = core.Age(k.Left)
		}
		if k.Status > 0 {
			status = fmt.Sprint(k.Status)
		}
		t.row(k.Part, k.State, core.Moment(k.Since), ends, status, k.Bytes, k.Fingerprint)
	}
	if err := t.flush(); err != nil {
		return err
	}
	for _, k := range all {
		if k.Body != "" || k.BodyBase64 != "" {
			printBody(cmd.OutOrStdout(), k.Part+", body", k.Body, k.BodyBase64)
		}
	}
	return nil
}

// printBody prints a body below its title, or as base64 on one line if it is no text.
func printBody(w io.Writer, title, text, base64 string) {
	if base64 != "" {
		fmt.Fprintf(w, "%-14s %s\n", title+", base64:", base64)
		return
	}
	fmt.Fprintln(w, title+":")
	for line := range strings.Lines(text) {
		fmt.Fprintf(w, "  %s\n", core.Plain(strings.TrimSuffix(line, "\n")))
	}
}

// limits shows and resets the use of limits.
func (o *commands) limits() *cobra.Command {
	return parent("limits", "Rate limits of a caller", o.limitsShow(), o.limitsReset())
}

func (o *commands) limitsShow() *cobra.Command {
	cmd := &cobra.Command{Use: "show KEY", Short: "Show how much of the limits a caller has left", Args: oneKey}
	only := o.addLimit(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		states, err := o.LimitStates(cmd.Context(), *only, args[0])
		if states == nil {
			return err
		}
		return errors.Join(printLimits(cmd, states), err)
	}
	return cmd
}

// addLimit adds --limit to a command about a caller. It completes the flag and the caller's key.
func (o *commands) addLimit(cmd *cobra.Command) *string {
	var names, keys []string
	for _, l := range o.Config.Limiters {
		names = append(names, core.Mapped(l.Limits, func(limit ratelimit.Limit) string { return limit.Name })...)
		keys = append(keys, l.Keys...)
	}
	only := cmd.Flags().String("limit", "", "only the limit of this `name`")
	complete(cmd, "limit", among(names))
	cmd.ValidArgsFunction = first(among(keys))
	return only
}

func printLimits(cmd *cobra.Command, states []core.LimitState) error {
	return printRows(cmd, states, func(t *table, s core.LimitState) {
		t.row(s.Limiter, s.Limit, s.Max, core.Age(s.Window), s.Remaining, core.Age(s.Reset))
	}, "LIMITER", "LIMIT", "MAX", "PER", "REMAINING", "MORE IN")
}

func (o *commands) limitsReset() *cobra.Command {
	cmd := &cobra.Command{Use: "reset KEY", Short: "Forget how much of the limits a caller has used", Args: oneKey}
	only := o.addLimit(cmd)
	flags := addChangeFlags(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		c, err := flags.change()
		if err != nil {
			return err
		}
		done, err := o.ResetLimits(cmd.Context(), *only, args[0], c)
		return errors.Join(printResets(cmd, done), err)
	}
	return cmd
}

func printResets(cmd *cobra.Command, done []core.LimitReset) error {
	if wantsJSON(cmd) {
		return printJSON(cmd, done)
	}
	for _, r := range done {
		verb := "is reset"
		if r.DryRun {
			verb = "would be reset"
		}
		fmt.Fprintf(cmd.OutOrStdout(), "%s: %s %s\n", r.Limiter, r.Limit, verb)
	}
	return nil
}

func oneKey(cmd *cobra.Command, args []string) error {
	if len(args) != 1 {
		return core.Mistakef("%s: needs one key", cmd.CommandPath())
	}
	return nil
}

// log lists the actions of operators.
func (o *commands) log() *cobra.Command {
	cmd := &cobra.Command{Use: "log", Short: "List the actions of operators, the newest first", Args: noArguments}
	var f operator.LogFilter
	cmd.Flags().IntVar(&f.Limit, "limit", core.Listed, "this many actions")
	cmd.Flags().BoolVar(&f.WithoutUpkeep, "without-upkeep", false, "leave out sweep, prune and setup, which services also run by themselves")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if f.Limit < 1 {
			return core.Mistakef("log: --limit must be at least 1")
		}
		actions, failed := o.Actions(cmd.Context(), f)
		return errors.Join(printActions(cmd, actions), failed)
	}
	return cmd
}

func printActions(cmd *cobra.Command, actions []operator.Action) error {
	return printRows(cmd, actions, func(t *table, a operator.Action) {
		count := "unknown"
		if a.Count != nil {
			count = fmt.Sprint(*a.Count)
		}
		t.row(core.Moment(a.At), a.What, a.On, count, a.By, a.Reason, core.Short(a.Chosen, 120), core.Short(a.Failure, 80))
	}, "AT", "WHAT", "ON", "COUNT", "BY", "REASON", "CHOSEN", "FAILURE")
}

// pause stops relays and consumers from starting work.
func (o *commands) pause() *cobra.Command {
	return o.turning(core.Pausing, "Pause all relays of an outbox, or all processes of a consumer",
		"Running work finishes. Writers go on, and new messages wait. The pause outlives the processes, until resume.")
}

func (o *commands) resume() *cobra.Command {
	return o.turning(core.Resuming, "Resume an outbox or a consumer", "The processes start work again within a few seconds.")
}

func (o *commands) turning(what, short, more string) *cobra.Command {
	cmd := &cobra.Command{Use: what + " NAME...", Short: short, Long: short + ".\n\n" + more}
	flags := addChangeFlags(cmd)
	cmd.ValidArgsFunction = among(core.Mapped(o.Pausables(), func(p core.Pausable) string { return p.Name }))
	cmd.RunE = func(cmd *cobra.Command, names []string) error {
		c, err := flags.change()
		if err != nil {
			return err
		}
		if len(names) == 0 {
			return core.Mistakef("%s: name an outbox or consumer", what)
		}
		parts := make([]core.Pausable, len(names))
		for i, name := range names {
			if parts[i], err = o.PausableNamed(name); err != nil {
				return core.Mistakef("%s: %w", what, err)
			}
		}
		var failed []error
		done := []core.Turned{} // not null in JSON
		for _, p := range parts {
			if err := o.Turn(cmd.Context(), what, p, c); err != nil {
				failed = append(failed, fmt.Errorf("%s: %w", p.Name, err))
				continue
			}
			done = append(done, core.Turned{Part: p.Name, Paused: what == core.Pausing, DryRun: c.DryRun})
		}
		return errors.Join(append(failed, printTurned(cmd, done))...)
	}
	return cmd
}

func printTurned(cmd *cobra.Command, done []core.Turned) error {
	if wantsJSON(cmd) {
		return printJSON(cmd, done)
	}
	for _, p := range done {
		is := map[bool]string{false: "is", true: "would be"}[p.DryRun]
		state := map[bool]string{false: "resumed", true: "paused"}[p.Paused]
		fmt.Fprintf(cmd.OutOrStdout(), "%s %s %s\n", p.Part, is, state)
	}
	return nil
}
