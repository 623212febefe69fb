package main

import (
	"context"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/internal/testenv"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

// counter is a probe of a value that grows by step at every call.
func counter(name string, k kind, from, step float64) probe {
	return func(_ context.Context, note func(string, kind, float64)) error {
		note(name, k, from)
		from += step
		return nil
	}
}

// The sampler finds each kind of leak, and nothing else.
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
		level = append(level, table("reservations", 1000, 100, 1e6, 1.02)) // grows by design: the size per row is constant
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
				t.Error("a constant series has a row")
			}
		}
		if len(s.series["bystander"].Points) != samples {
			t.Errorf("%d samples, want %d", len(s.series["bystander"].Points), samples)
		}
	})
}

// Seats that are held twice are found. A run in which no held seat was seen fails, too.
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
