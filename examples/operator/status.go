package operator

import (
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
)

// statusTimeout bounds what is asked of one part: a server that hangs must not keep the others from telling.
const statusTimeout = 10 * time.Second

// status is the state of all parts. Its JSON is what status --json prints.
type status struct {
	At        time.Time        `json:"at"`
	Outboxes  []outboxStatus   `json:"outboxes"`
	Consumers []consumerStatus `json:"consumers"`
	Sweeps    []sweepStatus    `json:"sweeps"`
	// Limits are those of Limiter.Keys, those first that have least left.
	Limits      []limitState        `json:"limits"`
	Claims      []claimsStatus      `json:"claims"`
	Connections []connectionsStatus `json:"connections"`
	// Failed says which limits could not be asked.
	Failed []string `json:"failed,omitempty"`
}

// outboxStatus is the state of an outbox. No count goes above 100,000: that means as many or more.
type outboxStatus struct {
	Name      string  `json:"name"`
	Ready     int     `json:"ready"`
	Parked    int     `json:"parked"`
	Dead      int     `json:"dead"`
	OldestAge float64 `json:"oldest_age_seconds"`
	// Lanes of the outbox that relays hold now, and that were lost by one.
	Leased   int `json:"lanes_leased"`
	Doubtful int `json:"lanes_doubtful"`
	// Stored is how many messages were ever stored; 0: the store does not tell.
	Stored int64 `json:"stored"`
	// StoredRate and LeftRate are how many a second were stored, and published or given up, since the look before.
	// Nil: there was none, or they cannot be told.
	StoredRate *float64 `json:"stored_per_second,omitempty"`
	LeftRate   *float64 `json:"left_per_second,omitempty"`
	// Transports are those of a relay of this process.
	Transports []transportStatus `json:"transports,omitempty"`
	// Paused is nil where it works.
	Paused   *pauseState `json:"paused,omitempty"`
	Pausable bool        `json:"-"`
	Error    string      `json:"error,omitempty"`
}

type consumerStatus struct {
	Name     string         `json:"name"`
	Waiting  int            `json:"waiting"`
	Retrying int            `json:"retrying"`
	PutOff   int            `json:"put_off"`
	Dead     map[string]int `json:"dead"` // by class
	// Part says that another session may hold further dead letters.
	Part bool `json:"part,omitempty"`
	// Rate is how many a second were processed in the last 10 s. Nil: the consumer does not tell.
	Rate     *float64    `json:"processed_per_second,omitempty"`
	Paused   *pauseState `json:"paused,omitempty"`
	Pausable bool        `json:"-"`
	Error    string      `json:"error,omitempty"`
}

// Letters are the classes of Dead that have any.
func (c consumerStatus) Letters() map[string]int {
	some := maps.Clone(c.Dead)
	maps.DeleteFunc(some, func(_ string, n int) bool { return n == 0 })
	return some
}

type sweepStatus struct {
	Name    string  `json:"name"`
	Overdue int     `json:"overdue"` // 10,000 means as many or more
	Lag     float64 `json:"lag_seconds"`
	// Next is in how many seconds the next row falls due; null: none will.
	Next    *float64 `json:"next_seconds"`
	Undated int      `json:"undated"`
	Error   string   `json:"error,omitempty"`
}

// measured is a consumer that can count its messages.
type measured interface {
	Stats(ctx context.Context) (inbox.Stats, error)
}

// look asks all parts, at the same time.
func (o *Operator) look(ctx context.Context) status {
	s := status{
		At: time.Now(), Outboxes: make([]outboxStatus, len(o.cfg.Outboxes)), Consumers: make([]consumerStatus, len(o.cfg.Consumers)),
		Sweeps: make([]sweepStatus, len(o.cfg.Sweeps)),
	}
	counters, connected := o.counters(), o.connected()
	s.Claims, s.Connections = make([]claimsStatus, len(counters)), make([]connectionsStatus, len(connected))
	ctx, cancel := context.WithTimeout(ctx, statusTimeout)
	defer cancel()
	var asking sync.WaitGroup
	for i, b := range o.cfg.Outboxes {
		asking.Go(func() { s.Outboxes[i] = lookAtOutbox(ctx, b) })
	}
	for i, c := range o.cfg.Consumers {
		asking.Go(func() { s.Consumers[i] = lookAtConsumer(ctx, c) })
	}
	for i, w := range o.cfg.Sweeps {
		asking.Go(func() { s.Sweeps[i] = lookAtSweep(ctx, w) })
	}
	for i, p := range counters {
		asking.Go(func() { s.Claims[i] = o.claims[i].look(ctx, p) })
	}
	for i, c := range connected {
		asking.Go(func() { s.Connections[i] = lookAtConnections(ctx, c) })
	}
	asking.Go(func() { s.Limits, s.Failed = o.lookAtLimits(ctx) })
	asking.Wait()
	s.Claims = slices.DeleteFunc(s.Claims, func(c claimsStatus) bool { return c.hidden })
	return s
}

func lookAtOutbox(ctx context.Context, b Outbox) outboxStatus {
	s := outboxStatus{Name: b.Name}
	store, ok := b.Store.(driver.Measured)
	if !ok {
		s.Error = "the store does not tell"
		return s
	}
	depth, err := store.Depth(ctx)
	s.Ready, s.Parked, s.Dead, s.OldestAge = depth.Ready, depth.Parked, depth.Dead, depth.OldestAge.Seconds()
	s.Leased, s.Doubtful, s.Stored = depth.Leased, depth.Doubtful, depth.Stored
	s.Transports = transportsOf(ctx, b.Relay)
	s.Paused, s.Pausable, s.Error = lookAtPause(ctx, b.Name, b.Store, err)
	return s
}

func lookAtConsumer(ctx context.Context, c Consumer) consumerStatus {
	s := consumerStatus{Name: c.Name}
	consumer, ok := c.Consumer.(measured)
	if !ok {
		s.Error = "the consumer does not tell"
		return s
	}
	stats, err := consumer.Stats(ctx)
	s.Waiting, s.Retrying, s.PutOff, s.Dead, s.Part = stats.Waiting, stats.Retrying, stats.PutOff, stats.Dead, stats.Held
	if p, ok := c.Inbox.(processor); ok && err == nil {
		var n int
		n, err = p.Processed(ctx, rateWindow)
		rate := float64(n) / rateWindow.Seconds()
		s.Rate = &rate
	}
	s.Paused, s.Pausable, s.Error = lookAtPause(ctx, c.Name, c.Inbox, err)
	return s
}

// lookAtPause asks for the pause of a part, unless the part has failed to answer.
func lookAtPause(ctx context.Context, name string, store any, err error) (state *pauseState, pausable bool, failure string) {
	p := pausableOf(name, store)
	if err == nil {
		state, err = p.state(ctx)
	}
	return state, p != nil, textOf(err)
}

func lookAtSweep(ctx context.Context, w Sweep) sweepStatus {
	s := sweepStatus{Name: w.Name}
	outlook, err := w.Store.Look(ctx, nil)
	s.Overdue, s.Lag, s.Undated, s.Error = outlook.Overdue, outlook.Lag.Seconds(), outlook.Undated, textOf(err)
	if outlook.Pending {
		next := max(0, outlook.Due.Seconds())
		s.Next = &next
	}
	return s
}

func textOf(err error) string {
	if err == nil {
		return ""
	}
	return oneLine(err)
}

// CanPause says that there is a part that can be paused.
func (s status) CanPause() bool {
	return slices.ContainsFunc(s.Outboxes, func(b outboxStatus) bool { return b.Pausable }) ||
		slices.ContainsFunc(s.Consumers, func(c consumerStatus) bool { return c.Pausable })
}

// paused are the parts that are paused, by name.
func (s status) paused() map[string]pauseState {
	paused := map[string]pauseState{}
	for _, b := range s.Outboxes {
		if b.Paused != nil {
			paused[b.Name] = *b.Paused
		}
	}
	for _, c := range s.Consumers {
		if c.Paused != nil {
			paused[c.Name] = *c.Paused
		}
	}
	return paused
}

// failed are the parts that could not be asked.
func (s status) failed() []string {
	var failed []string
	note := func(name, text string) {
		if text != "" {
			failed = append(failed, name+": "+text)
		}
	}
	for _, b := range s.Outboxes {
		note(b.Name, b.Error)
	}
	for _, c := range s.Consumers {
		note(c.Name, c.Error)
	}
	for _, w := range s.Sweeps {
		note(w.Name, w.Error)
	}
	for _, c := range s.Claims {
		note(c.Part, c.Error)
	}
	for _, c := range s.Connections {
		note(c.Server, c.Error)
	}
	return append(failed, s.Failed...)
}
