package main

import (
	"io"
	"strings"
	"testing"
)

// nowhere is an environment whose servers are not there.
func nowhere(name string) string {
	return map[string]string{
		"DATABASE_URL": "postgres://x@127.0.0.1:1/x", "REDIS_URL": "redis://127.0.0.1:1/0", "AMQP_URL": "amqp://127.0.0.1:1/",
	}[name]
}

func TestDefaultSweep(t *testing.T) {
	t.Parallel()
	cfg, err := parseConfig(nil, nowhere, io.Discard)
	if err != nil || cfg.sweep != "*/30 * * * *" {
		t.Errorf("sweeps at %q, %v, want every half hour", cfg.sweep, err)
	}
}

func TestDefaultPage(t *testing.T) {
	t.Parallel()
	for args, want := range map[string]struct{ page, trials bool }{
		"":                                         {true, true},
		"-trials=false":                            {true, false},
		"-page=false":                              {false, false},
		"-backend=services":                        {false, false},
		"-backend=services -page":                  {true, false},
		"-backend=services -trials":                {true, true},
		"-backend=services -role=api -page":        {true, false},
		"-backend=services -role=relay -page":      {true, false},
		"-backend=services -role=consumer -trials": {true, true},
	} {
		cfg, err := parseConfig(strings.Fields(args), nowhere, io.Discard)
		if err != nil || cfg.page != want.page || cfg.trials != want.trials {
			t.Errorf("%q: page %v, trials %v, %v", args, cfg.page, cfg.trials, err)
		}
	}
	for _, backend := range []string{backendMemory, backendServices} {
		if _, err := parseConfig([]string{"-backend=" + backend, "-trials", "-page=false"}, nowhere, io.Discard); err == nil {
			t.Errorf("%s: trials without a page", backend)
		}
	}
}
