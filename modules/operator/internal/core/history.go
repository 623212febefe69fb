package core

import (
	"context"
	"errors"
	"slices"
	"time"

	inboxdriver "github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/internal/runloop"
	"github.com/holdfast-go/holdfast/modules/operator"
)

// History has the figures of all parts, the oldest first.
type History struct {
	Hour, Day []operator.Figures // in steps of HourStep and DayStep
	Error     string
}

const (
	// HourStep and DayStep are the lengths of the steps of a History.
	HourStep, DayStep = 10 * time.Second, 5 * time.Minute
)

// readHistory returns the history of the service, at most one step old; nil: it keeps none.
func (o *Operator) readHistory(ctx context.Context) *History {
	if o.Config.History == nil {
		return nil
	}
	h := o.history.within(HourStep/2, func() History {
		ctx := context.WithoutCancel(ctx) // others wait for it, too
		hour, err := o.Config.History.Read(ctx, false)
		var day []operator.Figures
		if err == nil {
			day, err = o.Config.History.Read(ctx, true)
		}
		return History{hour, day, TextOf(err)}
	})
	return &h
}

// date sets the begin of problems that have none, by the history. A problem began after the last step without it. Steps that
// nobody has recorded count as part of the problem, because processes that fail may not record.
func (v *Verdict) date(h *History, at time.Time) {
	if h == nil || h.Error != "" {
		return
	}
	for i := range v.Problems {
		p := &v.Problems[i]
		for j := range p.Affected {
			if a := &p.Affected[j]; a.Since.IsZero() {
				a.Since = a.began(h, at)
			}
			if began := p.Affected[j].Since; !began.IsZero() && (p.Since.IsZero() || began.Before(p.Since)) {
				p.Since = began
			}
		}
		if p.Since.IsZero() {
			p.Since = p.began(h, at)
		}
	}
}

// began returns the time at which a problem began; zero: unknown.
func (p Problem) began(h *History, at time.Time) time.Time {
	began, ended := p.within(h.Hour, HourStep)
	if ended {
		return began
	}
	if earlier, _ := p.within(h.Day, DayStep); !earlier.IsZero() && (began.IsZero() || earlier.Before(began)) {
		began = earlier
	}
	if began.After(at) {
		return at // the clock of the store is ahead
	}
	return began
}

// within returns the begin of the problem in one series, and whether an earlier step was without it.
func (p Problem) within(series []operator.Figures, step time.Duration) (began time.Time, ended bool) {
	for i := len(series) - 1; i >= 0; i-- {
		f := series[i]
		switch {
		case f.Part != p.Part || p.dead && !f.Measured:
		case p.dead && f.Dead > 0 || !p.dead && f.Problems > 0:
			began = f.At
		case began.IsZero():
			return f.At.Add(step), true // it began after the last step
		default:
			return began, true
		}
	}
	return began, false
}

// Tally returns the counts of this process since its start and the problems that it sees itself, for each part, and sets the
// roles and the messages of the process. It makes no server call.
func (o *Operator) Tally(ctx context.Context, self *operator.Process) []operator.Figures {
	var all []operator.Figures
	var local Status
	self.Roles, self.Slowest = nil, nil
	runs := func(role, name string, ready error) {
		if _, elsewhere := errors.AsType[runloop.NotRunning](ready); !elsewhere {
			self.Roles = append(self.Roles, role+" "+name)
		}
	}
	for _, b := range o.Config.Outboxes {
		f, s := operator.Figures{Part: b.Name}, OutboxStatus{Name: b.Name}
		if b.Relay != nil {
			c, ready := b.Relay.Counts(), b.Relay.Ready(ctx)
			f.Done, f.Failed, f.Retried = c.Done, c.Failed, c.Retried
			runs("relay", b.Name, ready)
			s.Transports, s.NotReady = transportsOf(ctx, b.Relay, ready == nil), notReady(ready)
		}
		all, local.Outboxes = append(all, f), append(local.Outboxes, s)
	}
	for _, c := range o.Config.Consumers {
		f := operator.Figures{Part: c.Name}
		if counting, ok := c.Consumer.(interface{ Counts() inboxdriver.Counts }); ok {
			n := counting.Counts()
			f.Done, f.Failed, f.Retried = n.Done, n.Failed, n.Retried
		}
		s := ConsumerStatus{Name: c.Name}
		if here, ok := c.Consumer.(interface{ Ready(context.Context) error }); ok {
			ready := here.Ready(ctx)
			runs("consumer", c.Name, ready)
			s.NotReady = notReady(ready)
		}
		if here, ok := c.Consumer.(interface{ Running() []inboxdriver.Running }); ok {
			for _, m := range here.Running() {
				m.Consumer = c.Name
				self.Slowest = append(self.Slowest, m)
			}
		}
		all, local.Consumers = append(all, f), append(local.Consumers, s)
	}
	for _, w := range o.Config.Sweeps {
		s := SweepStatus{Name: w.Name}
		if w.Sweeper != nil {
			ready := w.Sweeper.Ready(ctx)
			runs("sweep", w.Name, ready)
			s.NotReady = notReady(ready)
		}
		all, local.Sweeps = append(all, operator.Figures{Part: w.Name}), append(local.Sweeps, s)
	}
	slices.SortStableFunc(self.Slowest, func(a, b inboxdriver.Running) int { return a.Since.Compare(b.Since) })
	self.InWork = len(self.Slowest)
	return withProblems(all, local)
}

// Measure asks the servers for the numbers of each part. A part that does not answer is not measured.
func (o *Operator) Measure(ctx context.Context) []operator.Figures {
	parts := Operator{Config: operator.Config{Outboxes: o.Config.Outboxes, Consumers: o.Config.Consumers, Sweeps: o.Config.Sweeps}}
	s := parts.readParts(ctx)
	var all []operator.Figures
	for _, b := range s.Outboxes {
		all = append(all, operator.Figures{
			Part: b.Name, Asked: true, Measured: b.Error == "", Waiting: b.Ready, Retrying: b.Parked, Dead: b.Dead, Lag: seconds(b.OldestAge),
		})
	}
	for _, c := range s.Consumers {
		all = append(all, operator.Figures{Part: c.Name, Asked: true, Measured: c.Error == "", Waiting: c.Waiting, Retrying: c.Retrying + c.PutOff, Dead: c.DeadCount()})
	}
	for _, w := range s.Sweeps {
		all = append(all, operator.Figures{Part: w.Name, Asked: true, Measured: w.Error == "", Waiting: w.Overdue, Lag: seconds(w.Lag)})
	}
	return withProblems(all, s)
}

// withProblems adds the numbers of problems.
func withProblems(all []operator.Figures, s Status) []operator.Figures {
	found := map[string]int{}
	for _, p := range Judge(s).Problems {
		for _, a := range p.each() {
			if !a.dead { // the number of dead letters is a figure of its own
				found[a.Part]++
			}
		}
	}
	for i := range all {
		all[i].Problems = found[all[i].Part]
	}
	return all
}
