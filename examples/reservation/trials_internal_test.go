package main

import (
	"io"
	"testing"
)

// What a page somewhere asks of consumers is nothing to those without the flag.
func TestOnlyTrialsSlowDown(t *testing.T) {
	t.Parallel()
	for _, flag := range []string{"-page", "-trials"} {
		cfg, err := parseConfig([]string{"-backend=services", flag}, nowhere, io.Discard)
		if err != nil {
			t.Fatal(err)
		}
		s, err := newServers(cfg)
		if err != nil {
			t.Fatal(err)
		}
		if slow := newParts(cfg, s).handled.slow; (slow != nil) != cfg.trials {
			t.Errorf("%s: consumers ask: %v", flag, slow != nil)
		}
		s.farewell = nil // nothing was said
		s.close()
	}
}
