package main

import (
	"io"
	"testing"
)

func TestDefaultSweep(t *testing.T) {
	t.Parallel()
	cfg, err := parseConfig(nil, func(string) string { return "" }, io.Discard)
	if err != nil || cfg.sweep != "*/30 * * * *" {
		t.Errorf("sweeps at %q, %v, want every half hour", cfg.sweep, err)
	}
}
