package main

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/internal/lab/ledger"
)

func TestRender(t *testing.T) {
	t.Parallel()
	v := verdict{
		recoveries: []recovery{
			{fault: "quick", held: 7, after: map[string]time.Duration{"ready": time.Second}},
			{fault: "slow", after: map[string]time.Duration{"outbox": 11 * time.Second}},
			{fault: "hopeless", after: map[string]time.Duration{}, err: errors.New("never")},
		},
		requests: 9, held: 8, stream: ledger.Verdict{Committed: 5},
		crashes: []crash{{"app1", "slow", "FATAL bad state"}},
	}
	scale := rates{}
	for _, role := range []string{"api", "sweeper", "relay", "consumer"} {
		scale[role] = map[int]float64{1: 200, 2: 300, 4: 150}
	}
	text := render("Written here.", []string{"Redis 8.0"}, scale, v, 10*time.Minute)
	for _, want := range []string{
		"# Clusters\n\nWritten here.\n\nFive hosts", "Servers: Redis 8.0. It took 10 minutes.", "| quick | 7 | 1.0 | 1.0 | 0.0 |", "| slow | 0 | **11.0** |", "| hopeless | 0 | **not well** |",
		"supervisor of its host started it again: 1\n\n- on app1, in \"slow\": `FATAL bad state`\n", "9 requests, 8 seats held", "- The stream: 5 committed", "\nNothing was lost", "| api | 1.00 | 1.50 | 0.75 | 200 requests for a seat |",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in\n%s", want, text)
		}
	}
	v.faults, v.crashes = []string{"one\ntwo"}, nil
	if text := render("", nil, nil, v, 0); !strings.Contains(text, "Wrong:\n\n- one; two\n") || strings.Contains(text, "Nothing was lost") || strings.Contains(text, "More of each role") || !strings.Contains(text, "No PgBouncer ended by itself") {
		t.Errorf("with a fault, and without a measurement:\n%s", text)
	}
}

func TestAddresses(t *testing.T) {
	t.Parallel()
	for url, want := range map[string]string{
		"redis://10.77.0.1:700/0": "10.77.0.1:700", "amqp://guest:guest@10.77.0.2:5672/": "10.77.0.2:5672",
	} {
		if got := addressOf(url); got != want {
			t.Errorf("%s is at %s, want %s", url, got, want)
		}
	}
	const url, want = "postgres://postgres@10.77.0.1:5432/postgres?sslmode=disable", "postgres://postgres@10.77.0.100:5432/postgres?sslmode=disable"
	if got := withHost(url, "10.77.0.100"); got != want {
		t.Errorf("%s, want %s", got, want)
	}
}
