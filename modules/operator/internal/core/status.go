package core

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/internal/runloop"
	"github.com/holdfast-go/holdfast/modules/operator"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
)

// statusTimeout bounds the requests to one part: a server that hangs must not block the others.
const statusTimeout = 10 * time.Second

// Status is the state of all parts. Its JSON is what status --json prints.
type Status struct {
	At time.Time `json:"at"`
	// Verdict is the judgement of the rest.
	Verdict   Verdict          `json:"verdict"`
	Outboxes  []OutboxStatus   `json:"outboxes"`
	Consumers []ConsumerStatus `json:"consumers"`
	Sweeps    []SweepStatus    `json:"sweeps"`
	// Limits are the limits of Limiter.Keys. Those with the least left come first.
	Limits      []LimitState        `json:"limits"`
	Claims      []claimsStatus      `json:"claims"`
	Connections []connectionsStatus `json:"connections"`
	// Findings are missing and wrong settings. They are at most five minutes old.
	Findings []FindingState `json:"findings"`
	// Failed has the errors of limits.
	Failed []string `json:"failed,omitempty"`
	// History has the figures of the last day; nil: the service keeps none.
	History *History `json:"-"`
	// unanswered are servers that did not answer, besides those in Connections.
	unanswered []unanswered
}

// OutboxStatus is the state of an outbox. Counts stop at 100,000, which means that many or more.
type OutboxStatus struct {
	Name      string  `json:"name"`
	Ready     int     `json:"ready"`
	Parked    int     `json:"parked"`
	Dead      int     `json:"dead"`
	OldestAge float64 `json:"oldest_age_seconds"`
	// Leased lanes are held by relays now. Doubtful lanes have lost their last lease.
	Leased   int `json:"lanes_leased"`
	Doubtful int `json:"lanes_doubtful"`
	// Stored is how many messages were ever stored; 0: unknown.
	Stored int64 `json:"stored,omitempty"`
	// StoredRate and LeftRate are messages per second since the status before: stored, and published or given up.
	// Nil: unknown.
	StoredRate *float64 `json:"stored_per_second,omitempty"`
	LeftRate   *float64 `json:"left_per_second,omitempty"`
	// Transports are the transports of this process's relay.
	Transports []transportStatus `json:"transports,omitempty"`
	// NotReady is the reason why this process's relay is not ready. Empty: it is ready, or none runs in this process.
	NotReady string `json:"not_ready,omitempty"`
	// Paused is nil if the outbox is not paused.
	Paused   *driver.Pause `json:"paused,omitempty"`
	Pausable bool          `json:"-"`
	Error    string        `json:"error,omitempty"`
}

// MarshalJSON leaves out the numbers of an outbox that did not answer.
func (s OutboxStatus) MarshalJSON() ([]byte, error) {
	type measured OutboxStatus
	return measuredOr(measured(s), unmeasured{Name: s.Name, Transports: s.Transports, NotReady: s.NotReady, Error: s.Error})
}

// unmeasured is the JSON of a part that did not answer.
type unmeasured struct {
	Name       string            `json:"name,omitempty"`
	Part       string            `json:"part,omitempty"`   // of claims
	Server     string            `json:"server,omitempty"` // of connections
	Transports []transportStatus `json:"transports,omitempty"`
	NotReady   string            `json:"not_ready,omitempty"`
	Error      string            `json:"error"`
}

// measuredOr returns the JSON of a part.
func measuredOr(measured any, other unmeasured) ([]byte, error) {
	if other.Error != "" {
		return json.Marshal(other)
	}
	return json.Marshal(measured)
}

// ConsumerStatus is the state of a consumer.
type ConsumerStatus struct {
	Name     string         `json:"name"`
	Waiting  int            `json:"waiting"`
	Retrying int            `json:"retrying"`
	PutOff   int            `json:"put_off"`
	Dead     map[string]int `json:"dead"` // by class
	// Part is true if another session may hold more dead letters.
	Part bool `json:"part,omitempty"`
	// Rate is messages processed per second in the last 10 s. Nil: unknown.
	Rate *float64 `json:"processed_per_second,omitempty"`
	// NotReady is the reason why this process's consumer is not ready. Empty: it is ready, or does not run here.
	NotReady string        `json:"not_ready,omitempty"`
	Paused   *driver.Pause `json:"paused,omitempty"`
	Pausable bool          `json:"-"`
	Error    string        `json:"error,omitempty"`
}

// MarshalJSON leaves out the numbers of a consumer that did not answer.
func (c ConsumerStatus) MarshalJSON() ([]byte, error) {
	type measured ConsumerStatus
	return measuredOr(measured(c), unmeasured{Name: c.Name, NotReady: c.NotReady, Error: c.Error})
}

// DeadLetters returns the classes in Dead that have any.
func (c ConsumerStatus) DeadLetters() map[string]int {
	some := maps.Clone(c.Dead)
	maps.DeleteFunc(some, func(_ string, n int) bool { return n == 0 })
	return some
}

// DeadCount returns the number of all dead letters.
func (c ConsumerStatus) DeadCount() int {
	n := 0
	for _, some := range c.Dead {
		n += some
	}
	return n
}

// SweepStatus is the state of a table whose rows expire.
type SweepStatus struct {
	Name    string  `json:"name"`
	Overdue int     `json:"overdue"` // 10,000 means as many or more
	Lag     float64 `json:"lag_seconds"`
	// Next is in how many seconds the next row falls due; null: there is none.
	Next    *float64 `json:"next_seconds"`
	Undated int      `json:"undated"`
	// NotReady is the reason why this process's sweeper is not ready. Empty: it is ready, or does not run here.
	NotReady string `json:"not_ready,omitempty"`
	Error    string `json:"error,omitempty"`
}

// MarshalJSON leaves out the numbers of a table that did not answer.
func (s SweepStatus) MarshalJSON() ([]byte, error) {
	type measured SweepStatus
	return measuredOr(measured(s), unmeasured{Name: s.Name, NotReady: s.NotReady, Error: s.Error})
}

// measurable is a consumer that can count its messages.
type measurable interface {
	Stats(ctx context.Context) (inbox.Stats, error)
}

// ReadStatus returns the state of all parts and their findings. It asks them at the same time.
func (o *Operator) ReadStatus(ctx context.Context) Status {
	var findings []FindingState
	var checking sync.WaitGroup
	checking.Go(func() { findings = o.findings(ctx) })
	s := o.readParts(ctx)
	checking.Wait()
	s.Findings = findings
	return s
}

// readParts is ReadStatus without the findings.
func (o *Operator) readParts(ctx context.Context) Status {
	s := Status{
		At: time.Now(), Outboxes: make([]OutboxStatus, len(o.Config.Outboxes)), Consumers: make([]ConsumerStatus, len(o.Config.Consumers)),
		Sweeps: make([]SweepStatus, len(o.Config.Sweeps)),
	}
	counters, connected := o.counters(), o.connected()
	s.Claims, s.Connections = make([]claimsStatus, len(counters)), make([]connectionsStatus, len(connected))
	ctx, cancel := context.WithTimeout(ctx, statusTimeout)
	defer cancel()
	var asking sync.WaitGroup
	for i, b := range o.Config.Outboxes {
		asking.Go(func() { s.Outboxes[i] = ReadOutbox(ctx, b) })
	}
	for i, c := range o.Config.Consumers {
		asking.Go(func() { s.Consumers[i] = readConsumer(ctx, c) })
	}
	for i, w := range o.Config.Sweeps {
		asking.Go(func() { s.Sweeps[i] = readSweep(ctx, w) })
	}
	for i, p := range counters {
		asking.Go(func() { s.Claims[i] = o.claims[i].read(ctx, p) })
	}
	for i, c := range connected {
		asking.Go(func() { s.Connections[i] = readConnections(ctx, c) })
	}
	asking.Go(func() { s.Limits, s.Failed = o.readLimits(ctx) })
	asking.Go(func() { s.History = o.readHistory(ctx) })
	asking.Wait()
	s.Claims = slices.DeleteFunc(s.Claims, func(c claimsStatus) bool { return c.hidden })
	s.Connections = slices.DeleteFunc(s.Connections, func(c connectionsStatus) bool { return c.Open == 0 && c.Error == "" }) // no right to count them
	s.unanswered = o.ping(ctx, Judge(s).Problems)
	s.judge()
	return s
}

// judge sets the verdict, with the times that the history knows.
func (s *Status) judge() {
	s.Verdict = Judge(*s)
	s.Verdict.date(s.History, s.At)
}

// ReadOutbox returns the state of one outbox.
func ReadOutbox(ctx context.Context, b operator.Outbox) OutboxStatus {
	s := OutboxStatus{Name: b.Name}
	store, ok := b.Store.(driver.Measured)
	if !ok {
		s.Error = "the store does not count its messages"
		return s
	}
	depth, err := store.Depth(ctx)
	s.Ready, s.Parked, s.Dead, s.OldestAge = depth.Ready, depth.Parked, depth.Dead, depth.OldestAge.Seconds()
	s.Leased, s.Doubtful, s.Stored = depth.Leased, depth.Doubtful, depth.Stored
	if b.Relay != nil {
		ready := b.Relay.Ready(ctx)
		s.Transports, s.NotReady = transportsOf(ctx, b.Relay, ready == nil), notReady(ready)
	}
	s.Paused, s.Pausable, s.Error = readPause(ctx, b.Name, b.Store, err)
	return s
}

func readConsumer(ctx context.Context, c operator.Consumer) ConsumerStatus {
	s := ConsumerStatus{Name: c.Name}
	consumer, ok := c.Consumer.(measurable)
	if !ok {
		s.Error = "the consumer does not count its messages"
		return s
	}
	stats, err := consumer.Stats(ctx)
	s.Waiting, s.Retrying, s.PutOff, s.Dead, s.Part = stats.Waiting, stats.Retrying, stats.PutOff, stats.Dead, stats.Held
	if p, ok := c.Inbox.(processor); ok && err == nil {
		var n int
		if n, err = p.Processed(ctx, rateWindow); err == nil {
			rate := float64(n) / rateWindow.Seconds()
			s.Rate = &rate
		}
	}
	s.NotReady = readiness(ctx, c.Consumer)
	s.Paused, s.Pausable, s.Error = readPause(ctx, c.Name, c.Inbox, err)
	return s
}

// readiness returns the reason why a consumer of this process is not ready.
func readiness(ctx context.Context, consumer any) string {
	if running, ok := consumer.(interface{ Ready(context.Context) error }); ok {
		return notReady(running.Ready(ctx))
	}
	return ""
}

// notReady returns the reason of a Ready, or nothing if no Run works in this process.
func notReady(err error) string {
	if _, elsewhere := errors.AsType[runloop.NotRunning](err); elsewhere {
		return ""
	}
	return TextOf(err)
}

// readPause reads the pause of a part. It does not ask the part if err is set.
func readPause(ctx context.Context, name string, store any, err error) (state *driver.Pause, pausable bool, failure string) {
	p := pausableOf(name, store)
	if err == nil {
		state, err = p.state(ctx)
	}
	return state, p != nil, TextOf(err)
}

func readSweep(ctx context.Context, w operator.Sweep) SweepStatus {
	s := SweepStatus{Name: w.Name}
	outlook, err := w.Store.Look(ctx, nil)
	s.Overdue, s.Lag, s.Undated, s.Error = outlook.Overdue, outlook.Lag.Seconds(), outlook.Undated, TextOf(err)
	if outlook.Pending {
		next := max(0, outlook.Due.Seconds())
		s.Next = &next
	}
	if w.Sweeper != nil {
		s.NotReady = notReady(w.Sweeper.Ready(ctx))
	}
	return s
}

// CanPause reports whether there is a part that can be paused.
func (s Status) CanPause() bool {
	return slices.ContainsFunc(s.Outboxes, func(b OutboxStatus) bool { return b.Pausable }) ||
		slices.ContainsFunc(s.Consumers, func(c ConsumerStatus) bool { return c.Pausable })
}

// Paused returns the pauses by the names of their parts.
func (s Status) Paused() map[string]driver.Pause {
	paused := map[string]driver.Pause{}
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

// Failures returns the errors of parts that did not answer.
func (s Status) Failures() []string {
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

// rateWindow is the time over which a consumer's rate is measured.
const rateWindow = 10 * time.Second

// processor is an inbox that counts processed messages.
type processor interface {
	Processed(ctx context.Context, d time.Duration) (int, error)
}

// transportStatus is the state of a relay's connection to a broker, and of its breaker.
type transportStatus struct {
	Name   string  `json:"name"`
	State  string  `json:"state"` // closed, paused or probing
	Window float64 `json:"window"`
	Error  string  `json:"error,omitempty"`
}

// Breaker is the state in the words of a breaker, because a pause is something else: an operator pauses an outbox.
func (t transportStatus) Breaker() string {
	if t.State == "paused" {
		return "open"
	}
	return t.State
}

// transportsOf returns the transports of a relay that has run in this process.
func transportsOf(ctx context.Context, relay *outbox.Relay, ready bool) []transportStatus {
	ended, cancel := context.WithCancel(ctx)
	cancel() // skips the store, which was asked already; the transports are returned anyway
	stats, _ := relay.Stats(ended)
	var all []transportStatus
	for name, t := range stats.Transports {
		if ready || t.Failures > 0 {
			all = append(all, transportStatus{cmp.Or(name, "default"), t.State, t.Window, TextOf(t.Err)})
		}
	}
	slices.SortFunc(all, func(a, b transportStatus) int { return cmp.Compare(a.Name, b.Name) })
	return all
}

// The intervals of measurements. Tests shorten them.
var (
	// RatesApart is the time between the two measurements of a rate.
	RatesApart = time.Second
	// LiveEvery is how often a live page is updated.
	LiveEvery = 2 * time.Second
)

// ReadStatusWithRates asks all parts, and the outboxes a second time, so that a single call returns rates, too.
func (o *Operator) ReadStatusWithRates(ctx context.Context) Status {
	s := o.ReadStatus(ctx)
	if !slices.ContainsFunc(s.Outboxes, func(b OutboxStatus) bool { return b.Error == "" && b.Stored > 0 }) {
		return s
	}
	select {
	case <-time.After(RatesApart):
	case <-ctx.Done():
		return s
	}
	outboxes := Operator{Config: operator.Config{Outboxes: o.Config.Outboxes}}
	again := outboxes.readParts(ctx)
	again.AddRates(s)
	s.At = again.At
	for i, b := range again.Outboxes {
		if b.Error == "" || s.Outboxes[i].Error != "" { // an answer is better than a later failure
			s.Outboxes[i] = b
		}
	}
	s.judge()
	return s
}

// AddRates sets the rates since an earlier status of the same parts.
func (s *Status) AddRates(before Status) {
	passed := s.At.Sub(before.At).Seconds()
	if before.At.IsZero() || passed <= 0 || len(before.Outboxes) != len(s.Outboxes) {
		return
	}
	for i := range s.Outboxes {
		now, then := &s.Outboxes[i], before.Outboxes[i]
		if now.Error != "" || then.Error != "" || now.Stored == 0 || max(now.Ready, now.Parked, then.Ready, then.Parked) >= driver.StatsLimit {
			continue
		}
		stored := float64(now.Stored - then.Stored)
		left := max(0, stored-float64(now.Ready+now.Parked-then.Ready-then.Parked)) / passed
		stored /= passed
		now.StoredRate, now.LeftRate = &stored, &left
	}
}

// claimsStatus is the number of idempotency keys in flight.
type claimsStatus struct {
	Part     string `json:"part"`
	InFlight int    `json:"in_flight"`
	// Estimated is true if the part has more keys than it scanned.
	Estimated bool   `json:"estimated,omitempty"`
	Error     string `json:"error,omitempty"`
	hidden    bool   // the program has no right to count them, or its client cannot
}

// MarshalJSON leaves out the number of a part that did not answer.
func (c claimsStatus) MarshalJSON() ([]byte, error) {
	type measured claimsStatus
	return measuredOr(measured(c), unmeasured{Part: c.Part, Error: c.Error})
}

// Count formats the number in flight.
func (c claimsStatus) Count() string {
	if c.Estimated {
		return fmt.Sprintf("~%d", c.InFlight)
	}
	return fmt.Sprint(c.InFlight)
}

// connectionsStatus are the connections to a server.
type connectionsStatus struct {
	Server string                 `json:"server"`
	Most   int                    `json:"most,omitempty"` // limit of the server; 0: unknown
	Open   int                    `json:"open"`
	Roles  []operator.Connections `json:"roles"`
	Error  string                 `json:"error,omitempty"`
}

// MarshalJSON leaves out the numbers of a server that did not answer.
func (c connectionsStatus) MarshalJSON() ([]byte, error) {
	type measured connectionsStatus
	return measuredOr(measured(c), unmeasured{Server: c.Server, Error: c.Error})
}

// counting is a part that counts claims in flight. exact reports whether it has counted all of them.
type counting interface {
	InFlight(ctx context.Context) (n int, exact bool, err error)
}

const (
	// countRest is the pause after a count of claims, as a multiple of its duration. A count scans the keys of Redis while
	// requests wait for the same Redis.
	countRest = 100
	// maxCountRest bounds the pause.
	maxCountRest = time.Minute
)

// claimsCount is the last count of a part's claims.
type claimsCount struct {
	mu   sync.Mutex
	last claimsStatus
	next time.Time // not counted again before
}

// read counts the claims of a part, or returns the last count if it is recent. On Redis a user may lack the right to the
// commands that count, and a client may not know the nodes of its cluster.
func (c *claimsCount) read(ctx context.Context, p operator.Part) claimsStatus {
	c.mu.Lock()
	defer c.mu.Unlock()
	began := time.Now()
	if began.Before(c.next) {
		return c.last
	}
	n, exact, err := p.Part.(counting).InFlight(ctx)
	hidden := redis.HasErrorPrefix(err, "NOPERM") || errors.Is(err, errors.ErrUnsupported)
	c.last = claimsStatus{p.Name, n, err == nil && !exact, TextOf(err), hidden}
	if err == nil {
		ended := time.Now()
		c.next = ended.Add(min(countRest*ended.Sub(began), maxCountRest))
	}
	return c.last
}

func readConnections(ctx context.Context, s operator.Server) connectionsStatus {
	roles, most, err := s.Connections(ctx)
	c := connectionsStatus{Server: s.Name, Most: most, Roles: roles, Error: TextOf(err)}
	for _, r := range roles {
		c.Open += r.Active + r.Waiting + r.Idle
	}
	return c
}

// counters returns the parts that count claims.
func (o *Operator) counters() []operator.Part {
	return slices.DeleteFunc(o.Parts(), func(p operator.Part) bool { _, ok := p.Part.(counting); return !ok })
}

// connected returns the servers that report their connections.
func (o *Operator) connected() []operator.Server {
	return slices.DeleteFunc(slices.Clone(o.Config.Servers), func(s operator.Server) bool { return s.Connections == nil })
}

// Total formats the number of open connections, and the server's limit if it is known.
func (c connectionsStatus) Total() string {
	if c.Most == 0 {
		return fmt.Sprint(c.Open)
	}
	return fmt.Sprintf("%d of %d", c.Open, c.Most)
}
