package main

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"slices"
	"time"
)

// kind describes how a series is judged.
type kind struct {
	unit      string
	tolerance float64
	slack     float64
	grows     bool
	floor     bool
}

// sampler collects series by name, in the order of their first appearance.
type sampler struct {
	began  time.Time
	names  []string
	series map[string]*series
	probes []probe
}

// probe measures one thing and passes the values to note.
type probe func(ctx context.Context, note func(name string, k kind, value float64)) error

func newSampler(probes ...probe) *sampler {
	return &sampler{began: time.Now(), series: map[string]*series{}, probes: probes}
}

// sample runs all probes once.
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

// run takes the given number of samples, evenly over the length, until ctx ends.
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

// conclude judges all series. It adds a table of the series that changed, and a finding for each that is not flat and does
// not grow by design.
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

// figure formats a number. Small figures have decimals.
func figure(f float64) string {
	if f < 100 && f > -100 {
		return decimals(f, 1)
	}
	return decimals(f, 0)
}

const (
	// warmUp is the part of a series that is not judged: pools fill, caches and heaps find their size.
	warmUp = 1.0 / 3
	// fewest is the minimum of points for a trend.
	fewest = 12
	// floorOf: the least of this many points is judged, for series with Floor.
	floorOf = 6
	// certain is the Mann-Kendall score from which points rise and do not only scatter. By chance one in 1,000 series
	// without a trend reaches it.
	certain = 3.1
)

// series has the samples of one thing.
type series struct {
	Name string
	Unit string
	// Tolerance is the growth, as a part of the level, that counts as flat.
	Tolerance float64
	// Slack is the growth, in the unit of the series, that counts as flat at any level.
	Slack float64
	// Grows means that the series grows by design: it is shown and not judged.
	Grows bool
	// Floor means that the least of each floorOf points is judged. Temporary values only add to a leak: a busy machine
	// raises the peaks, a leak raises the floor.
	Floor  bool
	Points []point
}

type point struct{ Second, Value float64 }

// trend is the course of a series after its warm-up.
type trend struct {
	series
	From, To float64 // of the line through the points, at both ends of the judged part
	Rises    bool    // the points rise and do not only scatter
	Flat     bool
}

// judge fits a line through the points after the warm-up. Its slope is the median of the slopes of all pairs, so that
// outliers, such as points just before a garbage collection, do not move it. The series is not flat if the line gains more
// than both the tolerance and the slack, and the points rise with certainty.
func judge(s series) (trend, error) {
	t := trend{series: s}
	judged := s.Points[int(math.Ceil(warmUp*float64(len(s.Points)))):]
	if s.Floor {
		judged = floors(judged)
	}
	if len(judged) < fewest {
		return t, fmt.Errorf("%s: %d points after the warm-up, want %d at least", s.Name, len(judged), fewest)
	}
	slope := medianSlope(judged)
	var levels []float64
	for _, p := range judged {
		levels = append(levels, p.Value-slope*p.Second)
	}
	level := median(levels)
	t.From = level + slope*judged[0].Second
	t.To = level + slope*judged[len(judged)-1].Second
	t.Rises = mannKendall(judged) > certain
	t.Flat = !t.Rises || t.To-t.From <= max(s.Tolerance*math.Abs(t.From), s.Slack)
	return t, nil
}

// floors returns the least of each floorOf points.
func floors(points []point) (least []point) {
	for some := range slices.Chunk(points, floorOf) {
		least = append(least, slices.MinFunc(some, func(a, b point) int { return cmp.Compare(a.Value, b.Value) }))
	}
	return least
}

func medianSlope(points []point) float64 {
	var slopes []float64
	for i, p := range points {
		for _, q := range points[i+1:] {
			slopes = append(slopes, (q.Value-p.Value)/(q.Second-p.Second))
		}
	}
	return median(slopes)
}

// mannKendall returns by how many standard deviations rising pairs outnumber falling ones.
func mannKendall(points []point) float64 {
	score, ties := 0, map[float64]int{}
	for i, p := range points {
		ties[p.Value]++
		for _, q := range points[i+1:] {
			switch {
			case q.Value > p.Value:
				score++
			case q.Value < p.Value:
				score--
			}
		}
	}
	term := func(n int) float64 { return float64(n) * float64(n-1) * float64(2*n+5) }
	variance := term(len(points))
	for _, n := range ties {
		variance -= term(n)
	}
	if variance <= 0 { // all points are the same
		return 0
	}
	return float64(score) / math.Sqrt(variance/18)
}

func median(figures []float64) float64 {
	s := slices.Sorted(slices.Values(figures))
	n := len(s)
	return (s[(n-1)/2] + s[n/2]) / 2
}
