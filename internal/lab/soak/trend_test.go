package main

import (
	"math"
	"math/rand/v2"
	"testing"
)

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

// Of a thousand series without a trend few may be called risen, and of as many with a leak of a fifth all are.
func TestJudgeSeldomErrs(t *testing.T) {
	t.Parallel()
	wrong := [2]int{}
	r := rand.New(rand.NewPCG(3, 4))
	for range 1000 {
		for leak := range 2 {
			s := series{Tolerance: 0.1}
			for i := range 60 {
				s.Points = append(s.Points, point{float64(i), 100 + 8*r.NormFloat64() + float64(leak)*float64(i)})
			}
			if got, err := judge(s); err != nil || got.Flat != (leak == 0) {
				wrong[leak]++
			}
		}
	}
	if wrong[0] > 5 || wrong[1] > 0 {
		t.Errorf("of 1,000 level series %d are called leaks; of 1,000 leaks %d are called flat", wrong[0], wrong[1])
	}
}

// What stays is told from what comes and goes, also where the machine becomes busier all along.
func TestJudgeLeftovers(t *testing.T) {
	t.Parallel()
	r := rand.New(rand.NewPCG(5, 6))
	for name, c := range map[string]struct {
		perHour, busier float64
		flat            bool
	}{
		"nothing stays":                     {0, 1, true},
		"nothing stays, ten times the load": {0, 10, true},
		"a few hundred rows an hour":        {300, 1, false},
		"the same beside that load":         {300, 10, false},
	} {
		for range 100 {
			s := series{Slack: leftover.slack, Floor: leftover.floor}
			for i := range samples {
				comes := 8 * r.ExpFloat64() * (1 + (c.busier-1)*float64(i)/samples)
				s.Points = append(s.Points, point{float64(10 * i), math.Floor(c.perHour*float64(10*i)/3600) + math.Floor(comes)})
			}
			if got, err := judge(s); err != nil || got.Flat != c.flat {
				t.Errorf("%s: from %.1f to %.1f, flat: %v (%v), want flat: %v", name, got.From, got.To, got.Flat, err, c.flat)
			}
		}
	}
}

func TestJudgeWantsPoints(t *testing.T) {
	t.Parallel()
	s := sampled(func(int, *rand.Rand) float64 { return 1 })
	s.Points = s.Points[:fewest]
	if _, err := judge(s); err == nil {
		t.Error("too few points are called flat")
	}
}
