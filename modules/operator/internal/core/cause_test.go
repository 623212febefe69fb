package core

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/modules/operator"
)

func TestCause(t *testing.T) {
	t.Parallel()
	for reason, want := range map[string]string{
		"outbox: publish: unavailable: dial tcp 10.0.0.7:5672: connect: connection refused":                                             "10.0.0.7:5672",
		"inboxamqp: no session with the broker: dial tcp [::1]:5672: i/o timeout":                                                       "[::1]:5672",
		"inboxamqp: stats: read tcp 10.0.0.2:49832->10.0.0.7:5672: read: connection reset by peer":                                      "10.0.0.7:5672",
		"dial tcp: lookup rabbit.example on 127.0.0.11:53: no such host":                                                                "rabbit.example",
		"dial unix /run/.s.PGSQL.5432: connect: no such file or directory":                                                              "/run/.s.PGSQL.5432",
		"inboxamqp: no session with the broker: Exception (501) Reason: \"EOF\"":                                                        "text Exception (501) Reason: \"EOF\"",
		"outbox: publish: unavailable: outboxamqp: Exception (501) Reason: \"EOF\"":                                                     "text Exception (501) Reason: \"EOF\"",
		"inboxamqp: no session with the broker":                                                                                         "",
		"context deadline exceeded":                                                                                                     "",
		"failed to connect to `user=a database=b`: 10.0.0.9:5432 (db): dial error: dial tcp 10.0.0.9:5432: connect: connection refused": "10.0.0.9:5432",
	} {
		if got, _ := cause(reason); got != want {
			t.Errorf("%s: %q, want %q", reason, got, want)
		}
	}
}

const (
	refused   = "dial tcp 10.0.0.7:5672: connect: connection refused"
	noSession = "inboxamqp: no session with the broker: " + refused
)

// cutOff is a service whose broker is down.
func cutOff(at time.Time) Status {
	return Status{
		At: at,
		Outboxes: []OutboxStatus{{
			Name: "outbox", OldestAge: 660, Dead: 1, Transports: []transportStatus{{Name: "default", State: "paused", Error: "outbox: publish: unavailable: " + refused}},
		}},
		Consumers: []ConsumerStatus{{Name: "billing", NotReady: noSession}, {Name: "mail", Error: "inboxamqp: stats: dial tcp 10.0.0.7:5672: i/o timeout"}},
		Sweeps:    []SweepStatus{{Name: "holds", Lag: 400}},
	}
}

// Problems with one cause are one problem. Other problems stay what they are.
func TestJudge_groupsByCause(t *testing.T) {
	t.Parallel()
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	named := cutOff(at)
	named.unanswered = []unanswered{{"RabbitMQ", refused}}
	const others = "; holds: overdue rows do not expire (); outbox: 1 dead letter ()"
	for want, s := range map[string]Status{
		"10.0.0.7:5672 does not answer: outbox, billing and mail wait (" + refused + ")" + others: cutOff(at),
		"RabbitMQ does not answer: outbox, billing and mail wait (" + refused + ")" + others:      named,
		"10.0.0.7:5672 does not answer: outbox waits (" + refused + ")": {
			At: at, Outboxes: []OutboxStatus{{Name: "outbox", OldestAge: 61, Transports: []transportStatus{{Name: "default", State: "paused", Error: refused}}}},
		},
		"billing and mail wait for the same reason (EOF)": {
			Consumers: []ConsumerStatus{{Name: "billing", NotReady: "inboxamqp: no session with the broker: EOF"}, {Name: "mail", NotReady: "inboxnats: no session with the broker: EOF"}},
		},
		"billing: no connection to the broker (a: dial tcp 10.0.0.7:5672: refused); mail: no connection to the broker (a: dial tcp 10.0.0.8:5672: refused)": {
			Consumers: []ConsumerStatus{{Name: "billing", Error: "a: dial tcp 10.0.0.7:5672: refused"}, {Name: "mail", Error: "a: dial tcp 10.0.0.8:5672: refused"}},
		},
		"billing: the consumer is not ready (2 handlers ignore cancellation); mail: the consumer is not ready (2 handlers ignore cancellation)": {
			Consumers: []ConsumerStatus{{Name: "billing", NotReady: "2 handlers ignore cancellation"}, {Name: "mail", NotReady: "2 handlers ignore cancellation"}},
		},
		"Cache does not answer: requests waits (dial tcp 10.0.0.9:6379: refused)": {
			Connections: []connectionsStatus{{Server: "Cache", Error: "dial tcp 10.0.0.9:6379: refused"}}, Failed: []string{"requests: user: dial tcp 10.0.0.9:6379: refused"},
		},
	} {
		var got []string
		for _, p := range Judge(s).Problems {
			got = append(got, p.String()+" ("+p.Reason+")")
		}
		if text := strings.Join(got, "; "); text != want {
			t.Errorf("%s\nwant %s", text, want)
		}
	}
	p := Judge(named).Problems[0]
	alerts := fmt.Sprint(Mapped(p.Alerts(), func(p Problem) string { return p.Alert }))
	links := fmt.Sprint(Mapped(p.Links(), func(p Problem) string { return p.Place }))
	if alerts != "[HoldfastTransportPaused HoldfastConsumerDisconnected HoldfastOutboxLagHigh]" || links != "[#part-outbox #part-billing #part-mail]" ||
		!p.Since.Equal(at.Add(-11*time.Minute)) || p.Alert != "HoldfastTransportPaused" || p.Runbook == "" {
		t.Errorf("%+v", p)
	}
	if f := withProblems([]operator.Figures{{Part: "outbox"}, {Part: "billing"}, {Part: "mail"}}, named); f[0].Problems != 2 || f[1].Problems != 1 || f[2].Problems != 1 {
		t.Errorf("the history has %+v", f)
	}
}

// A problem of several parts began with the first of them.
func TestVerdict_datesGroups(t *testing.T) {
	t.Parallel()
	at := time.Date(2026, 1, 2, 3, 4, 0, 0, time.UTC)
	h := &History{}
	for step := range 6 { // billing has failed for 40 s, mail for 20 s
		f := operator.Figures{At: at.Add(time.Duration(step-6) * HourStep)}
		billing, mail := f, f
		billing.Part, mail.Part = "billing", "mail"
		if step >= 2 {
			billing.Problems = 1
		}
		if step >= 4 {
			mail.Problems = 1
		}
		h.Hour = append(h.Hour, billing, mail)
	}
	v := Judge(Status{At: at, Consumers: []ConsumerStatus{{Name: "mail", NotReady: noSession}, {Name: "billing", NotReady: noSession}}})
	v.date(h, at)
	if len(v.Problems) != 1 || !v.Problems[0].Since.Equal(at.Add(-40*time.Second)) {
		t.Errorf("%+v", v.Problems)
	}
}

// Servers are pinged only while something fails at an unknown address.
func TestLook_pingsServersInTrouble(t *testing.T) {
	t.Parallel()
	pings := 0
	ping := func(context.Context) error { pings++; return errors.New(refused) }
	o := &Operator{Config: operator.Config{Servers: []operator.Server{{Name: "RabbitMQ", Ping: ping}}}}
	for range 2 {
		if found := o.ping(t.Context(), nil); found != nil || pings > 0 {
			t.Errorf("without trouble: %v, %d pings", found, pings)
		}
	}
	troubles := Judge(cutOff(time.Now())).Problems
	for range 2 { // the second answer is the first
		if found := o.ping(t.Context(), troubles); len(found) != 1 || found[0] != (unanswered{"RabbitMQ", refused}) || pings != 1 {
			t.Errorf("%v, %d pings", found, pings)
		}
	}
}
