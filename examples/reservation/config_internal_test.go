package main

import (
	"io"
	"strings"
	"testing"
)

func TestDefaultSweep(t *testing.T) {
	t.Parallel()
	cfg, err := parseConfig(nil, func(string) string { return "" }, io.Discard)
	if err != nil || cfg.sweep != "*/30 * * * *" {
		t.Errorf("sweeps at %q, %v, want every half hour", cfg.sweep, err)
	}
}

func TestDefaultPage(t *testing.T) {
	t.Parallel()
	for args, want := range map[string]bool{
		"": true, "-page=false": false, "-backend=services": false, "-backend=services -page": true, "-backend=services -role=api -page": true,
	} {
		cfg, err := parseConfig(strings.Fields(args), func(string) string { return "" }, io.Discard)
		if err != nil || cfg.page != want {
			t.Errorf("%q: page %v, %v", args, cfg.page, err)
		}
	}
	if _, err := parseConfig([]string{"-backend=services", "-role=relay", "-page"}, func(string) string { return "" }, io.Discard); err == nil {
		t.Error("a relay with a page")
	}
}
