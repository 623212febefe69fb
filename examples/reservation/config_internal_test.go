package main

import (
	"io"
	"testing"
	"time"
)

func TestDefaultSweep(t *testing.T) {
	t.Parallel()
	cfg, err := parseConfig(nil, func(string) string { return "" }, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	day := time.Date(2026, 5, 4, 0, 0, 0, 0, time.UTC)
	for from, want := range map[time.Duration]time.Duration{
		0: 30 * time.Minute, 29 * time.Minute: 30 * time.Minute, 30 * time.Minute: time.Hour, 31 * time.Minute: time.Hour,
	} {
		if got := cfg.schedule.Next(day.Add(from)); !got.Equal(day.Add(want)) {
			t.Errorf("after %v the next sweep is at %v, want %v", from, got.Sub(day), want)
		}
	}
}
