package main

import (
	"context"
	"fmt"
	"time"
)

// kind says how a series is judged.
type kind struct {
	unit      string
	tolerance float64
	slack     float64
	grows     bool
	floor     bool
}

// sampler collects series by name, in the order in which they were first seen.
type sampler struct {
	began  time.Time
	names  []string
	series map[string]*series
	probes []probe
}

// probe looks at one thing and hands what it sees to note.
type probe func(ctx context.Context, note func(name string, k kind, value float64)) error

func newSampler(probes ...probe) *sampler {
	return &sampler{began: time.Now(), series: map[string]*series{}, probes: probes}
}

// sample asks all probes once.
func (s *sampler) sample(ctx context.Context) error {
	second := time.Since(s.began).Seconds()
	for _, p := range s.probes {
		err := p(ctx, func(name string, k kind, value float64) { s.note(second, name, k, value) })
		if err != nil {
			return fmt.Errorf("sample: %w", err)
		}
	}
	return nil
}

func (s *sampler) note(second float64, name string, k kind, value float64) {
	if s.series[name] == nil {
		s.names = append(s.names, name)
		s.series[name] = &series{Name: name, Unit: k.unit, Tolerance: k.tolerance, Slack: k.slack, Grows: k.grows, Floor: k.floor}
	}
	s.series[name].Points = append(s.series[name].Points, point{second, value})
}

// run samples so many times, evenly over the length, until ctx ends.
func (s *sampler) run(ctx context.Context, length time.Duration, times int) error {
	tick := time.NewTicker(length / time.Duration(times))
	defer tick.Stop()
	for range times {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
		if err := s.sample(ctx); err != nil {
			return err
		}
	}
	return nil
}

// conclude judges all series. It adds a table of those that changed at all, and a finding for each that is not flat and
// not there to grow.
func (s *sampler) conclude(r *report) error {
	t := table{Title: "Sampled; the first third is a warm-up and not judged", Columns: []string{"", "unit", "from", "to", "flat up to", ""}}
	flat, still := 0, 0
	for _, name := range s.names {
		j, err := judge(*s.series[name])
		if err != nil {
			return err
		}
		word, upTo := "flat", "+"+figure(max(j.Tolerance*j.From, j.Slack))
		switch {
		case j.still():
			still++
			continue
		case j.Grows:
			word, upTo = "grows by design", ""
		case j.Flat:
			flat++
		default:
			word = "GROWS"
			r.find(false, "%s grows from %s to %s %s", j.Name, figure(j.From), figure(j.To), j.Unit)
		}
		t.add(j.Name, j.Unit, figure(j.From), figure(j.To), upTo, word)
	}
	r.Tables = append(r.Tables, t)
	r.find(flat+still > 0, "%d series are flat, and %d more never changed", flat, still)
	return nil
}

// still reports whether all points are the same.
func (s series) still() bool {
	for _, p := range s.Points {
		if p.Value != s.Points[0].Value {
			return false
		}
	}
	return true
}

// figure is short: small figures have decimals.
func figure(f float64) string {
	if f < 100 && f > -100 {
		return decimals(f, 1)
	}
	return decimals(f, 0)
}
