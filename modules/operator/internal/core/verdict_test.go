package core

import (
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/holdfast-go/holdfast/internal/testenv"
)

// The verdict has the thresholds of the alerts.
func TestRules_areThoseOfTheAlerts(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../../observability/rules.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var file struct {
		Groups []struct {
			Rules []struct {
				Alert, Expr string
				Labels      map[string]string
			}
		}
	}
	if err := yaml.Unmarshal(text, &file); err != nil {
		t.Fatal(err)
	}
	// These alerts need counters over time, or another process.
	unseen := []string{
		"HoldfastTargetDown", "HoldfastRelayAbsent", "HoldfastConsumerAbsent", "HoldfastSweeperAbsent", "HoldfastConsumerRetriesHigh", "HoldfastHandlerStuck",
		"HoldfastTransactionRetriesHigh", "HoldfastCommitUnknown", "HoldfastSweepQuarantine", "HoldfastIdempotencyOutcomeUnknown",
	}
	seen := 0
	for _, alert := range file.Groups[0].Rules {
		if severity := alert.Labels["severity"]; severity != "page" && severity != "ticket" {
			t.Errorf("%s has the severity %q: is it a problem?", alert.Alert, severity)
		}
		i := slices.IndexFunc(rules, func(r rule) bool { return r.alert == alert.Alert })
		if (i < 0) != slices.Contains(unseen, alert.Alert) {
			t.Errorf("%s must be in rules or in unseen", alert.Alert)
		}
		if i < 0 {
			continue
		}
		seen++
		threshold := "> " + strconv.FormatFloat(rules[i].above, 'g', -1, 64)
		compared := strings.HasSuffix(alert.Expr, threshold) || strings.Contains(alert.Expr, threshold+" ") || strings.Contains(alert.Expr, threshold+")")
		if !compared && rules[i].above != byState {
			t.Errorf("%s: the expression does not compare with %q: %s", alert.Alert, threshold, alert.Expr)
		}
	}
	if seen != len(rules)-1 { // the last rule has no alert
		t.Errorf("%d of %d rules have an alert", seen, len(rules)-1)
	}
}

// Every problem leads to a section of the runbooks.
func TestRules_haveRunbooks(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../../observability/runbooks.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range rules {
		if r.alert != "" && !strings.Contains(string(text), "\n## "+r.alert+"\n") {
			t.Errorf("there is no runbook for %s", r.alert)
		}
	}
}

func TestJudge(t *testing.T) {
	t.Parallel()
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	for name, c := range map[string]struct {
		status Status
		want   string // problems, with their alerts and times
	}{
		"nothing": {},
		"calm": {status: Status{
			Outboxes:  []OutboxStatus{{Name: "outbox", Ready: 5, OldestAge: 60, Leased: 4, Transports: []transportStatus{{Name: "default", State: "closed", Window: 1}}}},
			Consumers: []ConsumerStatus{{Name: "billing", Waiting: 9, Retrying: 9, PutOff: 9, Dead: map[string]int{"default": 0}, Part: true}},
			Sweeps:    []SweepStatus{{Name: "holds", Overdue: 9, Lag: 300, Undated: 1}},
			Limits:    []LimitState{{Limit: "user", Max: 10}},
		}},
		"dead letters": {
			Status{
				Outboxes:  []OutboxStatus{{Name: "outbox", Dead: 1}},
				Consumers: []ConsumerStatus{{Name: "billing", Dead: map[string]int{"validation": 17, "default": 1}}},
			},
			"outbox: 1 dead letter|HoldfastOutboxDeadLetters|; billing: 18 dead letters|HoldfastInboxDeadLetters|",
		},
		"lag": {
			Status{Outboxes: []OutboxStatus{{Name: "outbox", OldestAge: 61, Leased: 1}, {Name: "other", OldestAge: 7200}}},
			"outbox: the oldest message is not published|HoldfastOutboxLagHigh|03:03:04; " +
				"other: the oldest message is not published, no relay runs|HoldfastOutboxLagHigh|01:04:05",
		},
		"a paused transport, once": {
			Status{Outboxes: []OutboxStatus{{
				Name: "outbox", NotReady: "it is paused",
				Transports: []transportStatus{{Name: "default", State: "paused", Error: "no route"}, {Name: "audit", State: "probing"}, {Name: "mail", State: "closed"}},
			}}},
			"outbox: publishing waits for the broker (no route)|HoldfastTransportPaused|; outbox: publishing waits for the broker on audit|HoldfastTransportPaused|",
		},
		"lag behind a paused transport": {
			Status{Outboxes: []OutboxStatus{{Name: "outbox", OldestAge: 61, Transports: []transportStatus{{Name: "default", State: "paused", Error: "refused"}}}}},
			"outbox: publishing waits for the broker (refused)|HoldfastTransportPaused|; outbox: the oldest message is not published|HoldfastOutboxLagHigh|03:03:04",
		},
		"not ready": {
			Status{
				Outboxes:  []OutboxStatus{{Name: "outbox", NotReady: "no connection"}},
				Consumers: []ConsumerStatus{{Name: "billing", NotReady: "inboxtest: no session with the broker"}, {Name: "mail", NotReady: "2 handlers ignore cancellation"}},
				Sweeps:    []SweepStatus{{Name: "holds", NotReady: "no table"}},
			},
			"outbox: the relay is not ready (no connection)|HoldfastOutboxNotDraining|; " +
				"mail: the consumer is not ready (2 handlers ignore cancellation)|HoldfastConsumerStalled|; " +
				"billing: no connection to the broker (inboxtest: no session with the broker)|HoldfastConsumerDisconnected|; " +
				"holds: the sweeper is not ready (no table)|HoldfastSweepLate|",
		},
		"late": {
			Status{Sweeps: []SweepStatus{{Name: "holds", Lag: 301}}},
			"holds: overdue rows do not expire|HoldfastSweepLate|02:59:04",
		},
		"unreachable": {
			Status{
				Outboxes: []OutboxStatus{{Name: "outbox", Error: "down", NotReady: "down"}}, Consumers: []ConsumerStatus{{Name: "billing", Error: "gone"}},
				Sweeps: []SweepStatus{{Name: "holds", Error: "down"}}, Claims: []claimsStatus{{Part: "gate", Error: "refused"}},
				Connections: []connectionsStatus{{Server: "Postgres", Error: "down"}}, Failed: []string{"requests: user: refused"},
			},
			"outbox: the outbox does not answer (down)|HoldfastOutboxNotDraining|; billing: no connection to the broker (gone)|HoldfastConsumerDisconnected|; " +
				"holds: the table does not answer (down)|HoldfastSweepLate|; gate: the keys cannot be counted (refused)|HoldfastIdempotencyStoreDown|; " +
				"requests: the limiter does not answer (user: refused)|HoldfastLimiterFallback|; Postgres: the server does not answer (down)||",
		},
	} {
		c.status.At = at
		v := Judge(c.status)
		var got []string
		for _, p := range v.Problems {
			since := ""
			if !p.Since.IsZero() {
				since = p.Since.Format(time.TimeOnly)
			}
			text := p.String()
			if p.Reason != "" {
				text += " (" + p.Reason + ")"
			}
			got = append(got, text+"|"+p.Alert+"|"+since)
			if (p.Alert != "") != strings.HasPrefix(p.Runbook, Runbooks+"#holdfast") || p.Place == "" {
				t.Errorf("%s: %+v has no place or runbook", name, p)
			}
		}
		if text := strings.Join(got, "; "); text != c.want || v.Good != (c.want == "") {
			t.Errorf("%s: good is %v\n%s, want\n%s", name, v.Good, text, c.want)
		}
	}
}

func TestVerdict_headline(t *testing.T) {
	t.Parallel()
	for n, want := range []string{"All good", "1 problem", "2 problems"} {
		if got := (Verdict{Problems: make([]Problem, n)}).Headline(); got != want {
			t.Errorf("%d: %q, want %q", n, got, want)
		}
	}
}

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

func TestLasting(t *testing.T) {
	t.Parallel()
	for seconds, want := range map[float64]string{-1: "0 s", 0.9: "0 s", 59.9: "59 s", 60: "1 min", 3599: "59 min", 3600: "1 h", 172799: "47 h", 172800: "2 days"} {
		if got := Lasting(seconds); got != want {
			t.Errorf("%g: %q, want %q", seconds, got, want)
		}
	}
}
