package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

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

// The bounds of the outbox are about its own size, at the rate and with the sizes of the committed report.
func TestSizesOfTheOutbox(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		table           string
		kib, more, rate float64
		flat            bool
	}{
		"a tenth more":              {"holdfast_outbox", 2039, 204, 120, true},
		"one vacuum is late":        {"holdfast_outbox", 2039, 2000, 120, true},
		"three times the size":      {"holdfast_outbox", 2039, 4100, 120, false},
		"lanes, a page more":        {"holdfast_outbox_lanes", 192, 8, 120, true},
		"lanes, three times so big": {"holdfast_outbox_lanes", 192, 400, 120, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newSampler()
			for i := range samples {
				gained := c.more * float64(max(0, i-samples/3)) / (samples * 2 / 3)
				noteTable(func(name string, k kind, v float64) { s.note(float64(10*i), name, k, v) }, c.table, 1024*(c.kib+gained), 1024*c.kib, 16, 100, c.rate)
			}
			r := &report{}
			if err := s.conclude(r); err != nil {
				t.Fatal(err)
			}
			if flat := r.verdict() == nil; flat != c.flat {
				t.Errorf("flat: %v, want %v: %v", flat, c.flat, r.Tables)
			}
		})
	}
}

func TestSamplerEnds(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		broken := errors.New("broken")
		s := newSampler(func(context.Context, func(string, kind, float64)) error { return broken })
		if err := s.run(t.Context(), time.Minute, 10); !errors.Is(err, broken) {
			t.Errorf("run: %v, want %v", err, broken)
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if err := newSampler().run(ctx, time.Hour, 10); !errors.Is(err, context.Canceled) {
			t.Errorf("run: %v, want %v", err, context.Canceled)
		}
	})
}

func TestReadMetrics(t *testing.T) {
	t.Parallel()
	const text = "# HELP go_goroutines Number.\n# TYPE go_goroutines gauge\ngo_goroutines 37\nprocess_resident_memory_bytes 4.5e+07\nother{a=\"b c\"} 3\n"
	found := map[string]float64{}
	err := readMetrics(&http.Response{Body: io.NopCloser(strings.NewReader(text))}, found)
	if want := "map[go_goroutines:37 process_resident_memory_bytes:4.5e+07]"; err != nil || fmt.Sprint(found) != want {
		t.Errorf("%v (%v), want %s", found, err, want)
	}
}
