package core

import (
	"cmp"
	"fmt"
	"net/url"
	"slices"
	"strings"
	"time"
)

// Verdict is the answer to whether a service needs a person.
type Verdict struct {
	// Good is true if there is no problem.
	Good     bool      `json:"good"`
	Problems []Problem `json:"problems"`
}

// Problem is one thing that needs a person.
type Problem struct {
	// Part is the name of the outbox, consumer, sweep, limiter or server. Text says the problem without it. Reason is the error
	// behind it, if there is one.
	Part   string `json:"part"`
	Text   string `json:"text"`
	Reason string `json:"reason,omitempty"`
	// Since is when it began; zero: unknown.
	Since time.Time `json:"since,omitzero"`
	// Alert is the alert that the problem raises if it lasts, and Runbook the address of the alert's section. Empty: no alert
	// observes it.
	Alert   string `json:"alert,omitempty"`
	Runbook string `json:"runbook,omitempty"`
	// Affected are the problems that share one cause, such as a server that does not answer. The problem is then the cause, with the
	// error of all, the earliest time and the most urgent alert. Empty: the problem stands alone.
	Affected []Problem `json:"affected,omitempty"`
	// Place is the address on the page that shows it.
	Place  string `json:"-"`
	dead   bool   // it is about dead letters
	server bool   // Part is a server
}

// String returns the sentence of a problem, without the reason.
func (p Problem) String() string {
	if len(p.Affected) > 0 {
		return p.Part + " " + p.Text
	}
	return p.Part + ": " + p.Text
}

// Headline is the verdict in two words.
func (v Verdict) Headline() string {
	switch n := len(v.Problems); n {
	case 0:
		return "All good"
	case 1:
		return "1 problem"
	default:
		return fmt.Sprint(n, " problems")
	}
}

// Runbooks is the address of the runbooks.
const Runbooks = "https://github.com/holdfast-go/holdfast/blob/main/modules/operator/observability/runbooks.md"

// byState is the threshold of a rule that depends on a state, not on a number.
const byState = -1

// rule is the part of an alert that a Status shows. Above is the threshold of its expression.
type rule struct {
	alert string
	above float64
	see   func(s Status, above float64) []Problem
}

// rules are the alerts of observability/rules.yaml whose condition a Status shows, the most urgent ones first. A test compares
// them with that file. The other alerts need counters over time. An alert waits until its condition has lasted for some
// minutes. The verdict does not wait.
var rules = []rule{
	{"HoldfastTransportPaused", byState, pausedTransports},
	{"HoldfastOutboxNotDraining", byState, stuckRelays},
	{"HoldfastConsumerStalled", byState, stalledConsumers},
	{"HoldfastConsumerDisconnected", byState, disconnectedConsumers},
	{"HoldfastSweepLate", 300, lateSweeps},
	{"HoldfastIdempotencyStoreDown", byState, unreachableKeys},
	{"HoldfastLimiterFallback", byState, unreachableLimits},
	{"HoldfastOutboxLagHigh", 60, laggingOutboxes},
	{"HoldfastOutboxDeadLetters", 0, deadInOutboxes},
	{"HoldfastInboxDeadLetters", 0, deadInConsumers},
	{"", byState, silentServers},
}

// Judge returns the verdict on a status. A pause by an operator and a limit that rejects requests are no problems.
func Judge(s Status) Verdict {
	v := Verdict{Problems: []Problem{}} // not null in JSON
	for _, r := range rules {
		for _, p := range r.see(s, r.above) {
			if r.alert != "" {
				p.Alert, p.Runbook = r.alert, Runbooks+"#"+strings.ToLower(r.alert)
			}
			v.Problems = append(v.Problems, p)
		}
	}
	v.Problems = grouped(v.Problems)
	v.Good = len(v.Problems) == 0
	return v
}

func pausedTransports(s Status, _ float64) (found []Problem) {
	for _, b := range s.Outboxes {
		for _, t := range b.Transports {
			if t.State == "closed" {
				continue
			}
			text := "publishing waits for the broker" // not "paused", as by an operator
			if t.Name != "default" {
				text += " on " + t.Name
			}
			found = append(found, Problem{Part: b.Name, Text: text, Reason: t.Error, Place: anchor(b.Name)})
		}
	}
	return found
}

// stuckRelays returns the outboxes that cannot be read, and the relays that are not ready for another reason than a paused
// transport.
func stuckRelays(s Status, _ float64) (found []Problem) {
	for _, b := range s.Outboxes {
		paused := slices.ContainsFunc(b.Transports, func(t transportStatus) bool { return t.State != "closed" })
		switch {
		case b.Error != "":
			found = append(found, Problem{Part: b.Name, Text: "the outbox does not answer", Reason: b.Error, Place: anchor(b.Name)})
		case b.NotReady != "" && !paused:
			found = append(found, Problem{Part: b.Name, Text: "the relay is not ready", Reason: b.NotReady, Place: anchor(b.Name)})
		}
	}
	return found
}

func laggingOutboxes(s Status, above float64) (found []Problem) {
	for _, b := range s.Outboxes {
		if b.OldestAge <= above {
			continue
		}
		text := "the oldest message is not published"
		if b.Leased == 0 && b.Doubtful == 0 && len(b.Transports) == 0 { // a relay of this process has no leases while it is paused
			text += ", no relay runs"
		}
		since := s.At.Add(-seconds(b.OldestAge))
		found = append(found, Problem{Part: b.Name, Text: text, Since: since, Place: "waiting?from=" + url.QueryEscape(b.Name)})
	}
	return found
}

func deadInOutboxes(s Status, above float64) (found []Problem) {
	for _, b := range s.Outboxes {
		if float64(b.Dead) > above {
			found = append(found, lettersAt(b.Name, b.Dead))
		}
	}
	return found
}

// lettersAt is the problem of dead letters in one place.
func lettersAt(name string, n int) Problem {
	text := fmt.Sprint(n, " dead letters")
	if n == 1 {
		text = "1 dead letter"
	}
	return Problem{Part: name, Text: text, dead: true, Place: "groups?from=" + url.QueryEscape(name)}
}

func deadInConsumers(s Status, above float64) (found []Problem) {
	for _, c := range s.Consumers {
		if n := c.DeadCount(); float64(n) > above {
			found = append(found, lettersAt(c.Name, n))
		}
	}
	return found
}

// hasNoSession reports whether a consumer is not ready because it has no session with its broker.
func (c ConsumerStatus) hasNoSession() bool {
	return c.Error != "" || strings.Contains(c.NotReady, "no session with the broker")
}

func stalledConsumers(s Status, _ float64) (found []Problem) {
	for _, c := range s.Consumers {
		if c.NotReady != "" && !c.hasNoSession() {
			found = append(found, Problem{Part: c.Name, Text: "the consumer is not ready", Reason: c.NotReady, Place: anchor(c.Name)})
		}
	}
	return found
}

func disconnectedConsumers(s Status, _ float64) (found []Problem) {
	for _, c := range s.Consumers {
		if c.hasNoSession() {
			found = append(found, Problem{Part: c.Name, Text: "no connection to the broker", Reason: cmp.Or(c.Error, c.NotReady), Place: anchor(c.Name)})
		}
	}
	return found
}

func lateSweeps(s Status, above float64) (found []Problem) {
	for _, w := range s.Sweeps {
		at := Problem{Part: w.Name, Place: anchor(w.Name)}
		switch {
		case w.Error != "":
			at.Text, at.Reason = "the table does not answer", w.Error
		case w.NotReady != "":
			at.Text, at.Reason = "the sweeper is not ready", w.NotReady
		case w.Lag > above:
			at.Text, at.Since = "overdue rows do not expire", s.At.Add(-seconds(w.Lag))
		default:
			continue
		}
		found = append(found, at)
	}
	return found
}

func unreachableKeys(s Status, _ float64) (found []Problem) {
	for _, c := range s.Claims {
		if c.Error != "" {
			found = append(found, Problem{Part: c.Part, Text: "the keys cannot be counted", Reason: c.Error, Place: "#keys"})
		}
	}
	return found
}

func unreachableLimits(s Status, _ float64) (found []Problem) {
	for _, text := range s.Failed {
		limiter, why, _ := strings.Cut(text, ": ")
		found = append(found, Problem{Part: limiter, Text: "the limiter does not answer", Reason: why, Place: "#limits"})
	}
	return found
}

func silentServers(s Status, _ float64) (found []Problem) {
	for _, c := range s.Connections {
		if c.Error != "" {
			found = append(found, Problem{Part: c.Server, Text: "the server does not answer", Reason: c.Error, Place: "#connections", server: true})
		}
	}
	for _, u := range s.unanswered {
		found = append(found, Problem{Part: u.server, Text: "the server does not answer", Reason: u.reason, Place: "#verdict", server: true})
	}
	return found
}

// anchor is the place of a part on the page of the status.
func anchor(name string) string { return "#part-" + name }

// seconds returns a number of seconds as a duration.
func seconds(n float64) time.Duration { return time.Duration(n * float64(time.Second)) }

// Distance formats how long ago a time is, or how far ahead.
func Distance(now, at time.Time) string {
	if passed := now.Sub(at).Seconds(); passed >= 0 {
		return Lasting(passed) + " ago"
	}
	return "in " + Lasting(at.Sub(now).Seconds())
}

// Lasting formats a number of seconds in one unit, for people: 12 s, 5 min, 3 h, 2 days.
func Lasting(seconds float64) string {
	const minute, hour, day = 60, 3600, 86400
	switch {
	case seconds < minute:
		return fmt.Sprintf("%d s", int(max(0, seconds)))
	case seconds < hour:
		return fmt.Sprintf("%d min", int(seconds/minute))
	case seconds < 2*day:
		return fmt.Sprintf("%d h", int(seconds/hour))
	}
	return fmt.Sprintf("%d days", int(seconds/day))
}
