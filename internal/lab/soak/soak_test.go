package main

import (
	"context"
	"math"
	"math/rand/v2"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/internal/testenv"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

// sampled is a series of 180 points, ten seconds apart.
func sampled(value func(i int, r *rand.Rand) float64) series {
	s := series{Name: "s", Tolerance: 0.1, Slack: 4}
	r := rand.New(rand.NewPCG(1, 2))
	for i := range 180 {
		s.Points = append(s.Points, point{float64(10 * i), value(i, r)})
	}
	return s
}

func TestJudge(t *testing.T) {
	t.Parallel()
	noise := func(r *rand.Rand) float64 { return r.NormFloat64() * 8 }
	for name, c := range map[string]struct {
		value func(i int, r *rand.Rand) float64
		flat  bool
	}{
		"a level":                          {func(int, *rand.Rand) float64 { return 100 }, true},
		"nothing":                          {func(int, *rand.Rand) float64 { return 0 }, true},
		"noise":                            {func(_ int, r *rand.Rand) float64 { return 100 + noise(r) }, true},
		"a saw":                            {func(i int, _ *rand.Rand) float64 { return 50 + float64(i%23)*4 }, true},
		"a warm-up that ends":              {func(i int, r *rand.Rand) float64 { return 100 + 2*float64(min(i, 50)) + noise(r)/8 }, true},
		"what shrinks":                     {func(i int, r *rand.Rand) float64 { return 500 - float64(i) + noise(r) }, true},
		"a twentieth more":                 {func(i int, r *rand.Rand) float64 { return 1000 + 0.42*float64(i-60) + noise(r)/8 }, true},
		"little, within the slack":         {func(i int, _ *rand.Rand) float64 { return 5 + float64(i)/60 }, true},
		"spikes at the end":                {func(i int, _ *rand.Rand) float64 { return 100 + 900*math.Floor(float64(i)/165) }, true},
		"a leak":                           {func(i int, r *rand.Rand) float64 { return 100 + float64(i)/4 + noise(r) }, false},
		"a leak below a saw":               {func(i int, _ *rand.Rand) float64 { return 50 + float64(i%23)*4 + float64(i)/2 }, false},
		"a leak that began late":           {func(i int, r *rand.Rand) float64 { return 100 + float64(max(0, i-100)) + noise(r)/8 }, false},
		"one more goroutine every minute":  {func(i int, _ *rand.Rand) float64 { return 30 + float64(i/6) }, false},
		"a queue that grows from nothing":  {func(i int, _ *rand.Rand) float64 { return float64(max(0, i-40)) * 3 }, false},
		"a leak beside collections' peaks": {func(i int, _ *rand.Rand) float64 { return 100 + float64(i)/3 + 300*float64((i+1)%9/8) }, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got, err := judge(sampled(c.value))
			if err != nil || got.Flat != c.flat {
				t.Errorf("from %.1f to %.1f, rises: %v, flat: %v (%v), want flat: %v", got.From, got.To, got.Rises, got.Flat, err, c.flat)
			}
		})
	}
}

// counter is a probe of what grows by step at every look.
func counter(name string, k kind, from, step float64) probe {
	return func(_ context.Context, note func(string, kind, float64)) error {
		note(name, k, from)
		from += step
		return nil
	}
}

// A sampler that is given a leak of every kind finds each, and nothing else.
func TestSamplerFindsLeaks(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var leaking, level []probe
		for _, m := range ofProcess {
			leaking = append(leaking, counter("leaking: "+m.name, m.kind, 40, 1))
			level = append(level, counter("level: "+m.name, m.kind, 40, 0.02))
		}
		table := func(name string, live, dead, size, growth float64) probe {
			return func(_ context.Context, note func(string, kind, float64)) error {
				noteTable(note, name, size, size, live, dead, 10)
				size, live, dead = size*growth, live*growth, dead*growth
				return nil
			}
		}
		leaking = append(leaking, table("leaking", 100, 5000, 1e6, 1.02))
		level = append(level, table("reservations", 1000, 100, 1e6, 1.02)) // it grows by design: each row takes as much as before
		s := newSampler(append(append(leaking, level...), counter("bystander", kind{tolerance: 0.1}, 7, 0))...)
		if err := s.run(t.Context(), time.Hour, samples); err != nil {
			t.Fatal(err)
		}
		r := &report{}
		if err := s.conclude(r); err != nil {
			t.Fatal(err)
		}
		found := 0
		for _, f := range r.Findings {
			if f.OK {
				continue
			}
			found++
			if !strings.HasPrefix(f.What, "leaking: ") {
				t.Error(f.What)
			}
		}
		if want := len(ofProcess) + 4; found != want {
			t.Errorf("%d leaks are found, want %d: %v", found, want, r.Findings)
		}
		for _, row := range r.Tables[0].Rows {
			if row[0] == "bystander" {
				t.Error("what never changed has a row")
			}
		}
		if len(s.series["bystander"].Points) != samples {
			t.Errorf("%d samples, want %d", len(s.series["bystander"].Points), samples)
		}
	})
}

// Seats that are held twice are found, and so is a run in which none was held when somebody looked.
func TestSeats(t *testing.T) {
	t.Parallel()
	for s, ok := range map[seats]bool{
		{looks: 9, held: 800}:           true,
		{looks: 9, held: 800, twice: 1}: false,
		{looks: 9}:                      false,
		{}:                              false,
	} {
		r := &report{}
		if s.judge(r); (r.verdict() == nil) != ok {
			t.Errorf("%+v: %v, want %v", s, r.Findings, ok)
		}
	}
}
