package faults_test

import (
	"context"
	"testing"
	"time"

	"github.com/google/uuid"
	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/internal/amqptest"
	"github.com/holdfast-go/holdfast/internal/pgtest"
)

// inboxPoisons are the kinds of bad messages, with where they end and after how many attempts.
var inboxPoisons = []struct {
	name     string
	do       string
	spoil    func(m *amqp.Publishing)
	class    string
	attempts int
}{
	{"no JSON", doWell, func(m *amqp.Publishing) { m.Body = m.Body[:10] }, driver.ClassValidation, 1},
	{"unknown name", doWell, func(m *amqp.Publishing) { m.Type = "faults.unknown" }, driver.ClassValidation, 1},
	{"id of version 4", doWell, func(m *amqp.Publishing) { m.MessageId = uuid.NewString() }, driver.ClassValidation, 1},
	{"fails for good", doDead, nil, driver.ClassUnrecoverable, 1},
	{"fails always", doFail, nil, driver.ClassDefault, inboxRetries + 1},
	{"panics always", doPanic, nil, driver.ClassDefault, inboxRetries + 1},
}

// One bad message in a hundred slows the good ones down by little, and each ends where it
// belongs.
func TestInboxPoison(t *testing.T) {
	n := 2000
	if long(t) {
		n = 100_000
	} else {
		t.Parallel()
	}
	job := inboxJob{Database: pgtest.URL(t), Broker: amqptest.New(t).URL, Concurrency: 8}
	i := newIntake(t, job)
	good := func() amqp.Publishing {
		m := i.event(doWell)
		i.sent[uuid.MustParse(m.MessageId)] = doWell
		return m
	}
	var before, all, after []amqp.Publishing
	want := map[string]int{} // the number of the kind, by message id
	for k := range n {
		before, all, after = append(before, good()), append(all, good()), append(after, good())
		if k%100 == 50 {
			kind := (k / 100) % len(inboxPoisons)
			p := i.event(inboxPoisons[kind].do)
			if spoil := inboxPoisons[kind].spoil; spoil != nil {
				spoil(&p)
			}
			want[p.MessageId] = kind
			all = append(all, p)
		}
	}
	// The tables grow meanwhile: what is compared lies on both sides.
	first, mixed, last := i.rate(before), i.rate(all), i.rate(after)
	alone := (first + last) / 2
	t.Logf("%d good messages: %.0f/s and %.0f/s alone, %.0f/s with %d bad ones, %.2f", n, first, last, mixed, len(want), mixed/alone)
	if long(t) && mixed < 0.9*alone { // a short run measures the noise
		t.Errorf("bad messages slow the good ones down to %.2f", mixed/alone)
	}
	stop := i.start()
	untilTrue(t, "the bad ones are dead letters", func() bool { return len(i.dead()) == len(want) })
	stop()
	for id, letters := range i.dead() {
		kind, ours := want[id.String()]
		if !ours || len(letters) != 1 {
			t.Errorf("%d dead letters of %s, %q", len(letters), id, i.sent[id])
			continue
		}
		if p, d := inboxPoisons[kind], letters[0]; d.Class != p.class || d.Attempts != p.attempts {
			t.Errorf("%s: class %s after %d attempts, want %s after %d: %s", p.name, d.Class, d.Attempts, p.class, p.attempts, d.Error)
		}
	}
	i.audit()
}

// rate is how fast the good ones among the messages take effect.
func (i *intake) rate(msgs []amqp.Publishing) float64 {
	i.t.Helper()
	must(i.t, i.publish(context.WithoutCancel(i.t.Context()), msgs))
	var before int
	must(i.t, i.pool.QueryRow(i.t.Context(), `SELECT count(*) FROM inbox_effects`).Scan(&before))
	good := 0
	for _, m := range msgs {
		if _, known := i.sent[uuid.MustParse(m.MessageId)]; known {
			good++
		}
	}
	began := time.Now()
	stop := i.start()
	defer stop()
	for {
		var now int
		must(i.t, i.pool.QueryRow(i.t.Context(), `SELECT count(*) FROM inbox_effects`).Scan(&now))
		taken := time.Since(began)
		left := good - (now - before)
		if left <= 0 {
			return float64(good) / taken.Seconds()
		}
		if taken > 5*time.Minute {
			i.t.Fatalf("%d of %d good messages after five minutes", now-before, good)
		}
		// Seldom while much is left: each look costs the database a good deal.
		time.Sleep(min(max(taken*time.Duration(left)/time.Duration(2*max(good-left, 1)), 5*time.Millisecond), time.Second))
	}
}
