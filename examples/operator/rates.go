package operator

import (
	"cmp"
	"context"
	"slices"
	"time"

	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
)

// rateWindow is the time over which the rate of a consumer is told.
const rateWindow = 10 * time.Second

// processor is an inbox that counts what was processed.
type processor interface {
	Processed(ctx context.Context, d time.Duration) (int, error)
}

// transportStatus is a relay's way to a broker, and the breaker before it.
type transportStatus struct {
	Name   string  `json:"name"`
	State  string  `json:"state"` // closed, paused or probing
	Window float64 `json:"window"`
	Error  string  `json:"error,omitempty"`
}

// transportsOf are those of a relay that has run in this process.
func transportsOf(ctx context.Context, relay *outbox.Relay) []transportStatus {
	if relay == nil {
		return nil
	}
	ready := relay.Ready(ctx)
	ended, cancel := context.WithCancel(ctx)
	cancel() // the store was asked already, and the transports are told all the same
	stats, _ := relay.Stats(ended)
	var all []transportStatus
	for name, t := range stats.Transports {
		if ready == nil || t.Failures > 0 {
			all = append(all, transportStatus{cmp.Or(name, "default"), t.State, t.Window, textOf(t.Err)})
		}
	}
	slices.SortFunc(all, func(a, b transportStatus) int { return cmp.Compare(a.Name, b.Name) })
	return all
}

// ratesApart is how far apart two looks are that tell a rate. Tests shorten it.
var ratesApart = time.Second

// lookForRates asks all parts, and the outboxes a second time, so that a single look tells rates, too.
func (o *Operator) lookForRates(ctx context.Context) status {
	s := o.look(ctx)
	if !slices.ContainsFunc(s.Outboxes, func(b outboxStatus) bool { return b.Error == "" && b.Stored > 0 }) {
		return s
	}
	select {
	case <-time.After(ratesApart):
	case <-ctx.Done():
		return s
	}
	outboxes := Operator{cfg: Config{Outboxes: o.cfg.Outboxes}}
	again := outboxes.look(ctx)
	again.addRates(s)
	s.At = again.At
	for i, b := range again.Outboxes {
		if b.Error == "" || s.Outboxes[i].Error != "" { // a good answer is better than a failure behind it
			s.Outboxes[i] = b
		}
	}
	return s
}

// addRates tells how many messages were stored and have left since an earlier look at the same parts.
func (s *status) addRates(before status) {
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
