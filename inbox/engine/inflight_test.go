package engine

import (
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"regexp"
	"slices"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/internal/ids"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

type delivered struct{ m inbox.Message }

func (d *delivered) Message() *inbox.Message { return &d.m }

// limitSlow is the limit of the handler slow.
type limitSlow int

func (l limitSlow) Limit(name string) int {
	if name == "slow" {
		return int(l)
	}
	return 0
}

// inflightModel drives an inflight at random and checks its rules.
type inflightModel struct {
	t        *testing.T
	cfg      *settings
	inflight *inflight
	now      time.Time
	session  *session
	alarm    *alarm

	lanes   map[string][]uuid.UUID // the messages in flight of each key, in order
	items   map[uuid.UUID]bool     // the messages in flight
	running []*job
	solo    *job
	soloAt  time.Time
	gone    map[uuid.UUID]bool
}

func newInflightModel(t *testing.T, ordered bool, batch int) *inflightModel {
	t.Helper()
	cfg := &settings{Config: Config{ConsumerConfig: inbox.ConsumerConfig{
		Ordered: ordered, Concurrency: 3, Batch: batch, Prefetch: 100,
	}}, limiter: limitSlow(2)}
	return &inflightModel{
		t: t, cfg: cfg, inflight: newInflight(cfg), now: time.Unix(1_700_000_000, 0), session: &session{}, alarm: newAlarm(),
		lanes: map[string][]uuid.UUID{}, items: map[uuid.UUID]bool{}, gone: map[uuid.UUID]bool{},
	}
}

func (h *inflightModel) add(m inbox.Message, again bool) {
	it := &item{d: &delivered{m}, session: h.session}
	it.m = it.d.Message()
	if h.cfg.Ordered {
		it.key = m.Key
	}
	twinRuns := again && h.inflight.orphans[it.twin()] != nil
	h.inflight.add(it, false, h.now)
	if twinRuns {
		return
	}
	h.items[m.ID] = true
	if it.key != "" {
		h.lanes[it.key] = append(h.lanes[it.key], m.ID)
	}
}

// begin starts the jobs that may start, and checks that they may.
func (h *inflightModel) begin(room int) {
	for room > 0 {
		j := h.inflight.queues.next(h.now, room, h.alarm)
		if j == nil {
			return
		}
		room -= len(j.items)
		h.check(j, room)
		h.running = append(h.running, j)
	}
	if j := h.inflight.queues.next(h.now, 0, h.alarm); j != nil {
		h.t.Fatal("began with no room")
	}
}

func (h *inflightModel) check(j *job, room int) {
	if room < 0 || len(j.items) > h.cfg.Batch || len(h.running) >= h.cfg.Concurrency {
		h.t.Fatalf("%d messages in a job, beside %d jobs, %d too many", len(j.items), len(h.running), -room)
	}
	if h.solo != nil && h.now.Before(h.soloAt.Add(soloPatience)) { // timing: the model's own clock
		h.t.Fatal("something begins beside a suspect")
	}
	slow := 0
	for _, other := range append([]*job{j}, h.running...) {
		if !other.alone && slices.ContainsFunc(other.items, func(it *item) bool { return it.m.Name == "slow" }) {
			slow++
		}
	}
	if slow > 2 {
		h.t.Fatalf("%d jobs of a handler with the limit 2", slow)
	}
	if j.alone {
		for _, other := range h.running {
			if h.now.Before(other.began.Add(soloPatience)) { // timing: the model's own clock
				h.t.Fatal("a suspect begins beside others")
			}
		}
		h.solo, h.soloAt = j, h.now
	}
	for _, it := range j.items {
		if !h.items[it.m.ID] || it.state != running || it.mode != batched && len(j.items) > 1 {
			h.t.Fatalf("%+v begins", it)
		}
		if it.key != "" && h.lanes[it.key][0] != it.m.ID {
			h.t.Fatal("a message of a key overtakes another")
		}
	}
}

// end ends a job; outcome applies to each message.
func (h *inflightModel) end(i, outcome int) {
	j := h.running[i]
	h.running = slices.Delete(h.running, i, i+1)
	if h.solo == j {
		h.solo = nil
	}
	h.inflight.queues.ended(j, h.now)
	for _, it := range j.items {
		switch {
		case it.state == orphaned: // it will be redelivered, if it has not been yet
			h.inflight.gone(it)
			h.leave(it)
		case outcome == 1:
			it.mode = max(it.mode, single)
			h.inflight.delay(it, h.now.Add(7*time.Second))
		case outcome == 2 && len(j.items) == 1 && it.mode != alone:
			it.mode = alone
			h.inflight.queues.ready(it)
		default:
			h.inflight.gone(it)
			if h.gone[it.m.ID] {
				h.t.Fatal("a message ends twice")
			}
			h.gone[it.m.ID] = true
			h.leave(it)
		}
	}
	h.inflight.queues.reuse(j)
}

func (h *inflightModel) leave(it *item) {
	delete(h.items, it.m.ID)
	h.lanes[it.key] = slices.DeleteFunc(h.lanes[it.key], func(id uuid.UUID) bool { return id == it.m.ID })
}

// cut ends the session. All unsettled messages are redelivered in their order, some of them after a while.
func (h *inflightModel) cut() {
	var again []inbox.Message
	for it := h.inflight.all.head; it != nil; it = it.next {
		again = append(again, *it.d.Message())
	}
	h.inflight.drop(h.now)
	h.session = &session{}
	for id := range h.items {
		if !slices.ContainsFunc(h.running, func(j *job) bool {
			return slices.ContainsFunc(j.items, func(it *item) bool { return it.m.ID == id })
		}) {
			delete(h.items, id)
		}
	}
	for key, lane := range h.lanes {
		h.lanes[key] = slices.DeleteFunc(lane, func(id uuid.UUID) bool { return !h.items[id] })
	}
	for _, m := range again {
		h.add(m, true)
	}
}

// finish ends all messages in flight, with turns of the alarm only.
func (h *inflightModel) finish() {
	for steps := 0; h.inflight.all.n > 0; steps++ {
		if steps > 10_000 {
			h.t.Fatalf("%d items never end", h.inflight.all.n)
		}
		h.alarm.reset(h.now)
		h.inflight.due(h.now, h.alarm)
		h.begin(1 << 20)
		if len(h.running) > 0 {
			h.end(0, 0)
			continue
		}
		at := h.alarm.at
		if at.IsZero() {
			h.t.Fatalf("%d items wait for nothing", h.inflight.all.n)
		}
		h.now = at
	}
	if c := h.inflight.waiting; c.n != 0 || c.bytes != 0 || c.now != 0 || len(h.inflight.keys) != 0 || len(h.inflight.delayed) != 0 {
		h.t.Fatalf("an empty inflight has %+v, %d keys, %d held", c, len(h.inflight.keys), len(h.inflight.delayed))
	}
}

func (h *inflightModel) play(script []byte) {
	for _, b := range script {
		n := int(b >> 3)
		switch b & 7 {
		case 0, 1, 2:
			m := inbox.Message{ID: ids.New(), Name: "x", Attempt: 1 + n&1, Body: []byte("body")}
			if n&2 != 0 {
				m.Name = "slow"
			}
			if n&4 != 0 {
				m.Key = fmt.Sprint("k", n>>3)
			}
			h.add(m, false)
		case 3, 4:
			h.begin(1 + n)
		case 5, 6:
			if len(h.running) > 0 {
				h.end(n%len(h.running), n%4)
			}
		default:
			if n == 0 {
				h.cut()
				break
			}
			h.now = h.now.Add(time.Duration(n) * time.Second)
			h.inflight.due(h.now, h.alarm)
		}
		h.count()
	}
	h.finish()
}

// count compares the counters of inflight with its items.
func (h *inflightModel) count() {
	begun, waiting := 0, 0
	for it := h.inflight.all.head; it != nil; it = it.next {
		if it.state == running || it.state == orphaned {
			begun++
		}
		if it.waiting {
			waiting++
		}
	}
	want := 0
	for _, j := range h.running {
		want += len(j.items)
	}
	if begun != want || waiting != h.inflight.waiting.n || len(h.inflight.queues.limits.jobs) != len(h.running) {
		h.t.Fatalf("%d of %d run, %d wait, %d by the count", begun, want, waiting, h.inflight.waiting.n)
	}
}

// TestInflight_model drives several inflights at random.
func TestInflight_model(t *testing.T) {
	t.Parallel()
	for range testenv.Sequences(t, 500) {
		script := make([]byte, rand.N(200))
		for i := range script {
			script[i] = byte(rand.Uint32())
		}
		newInflightModel(t, rand.N(2) == 0, []int{1, 4}[rand.N(2)]).play(script)
	}
}

func FuzzInflight(f *testing.F) {
	f.Add(true, byte(4), []byte{0, 8, 32, 4, 5, 7})
	f.Fuzz(func(t *testing.T, ordered bool, batch byte, script []byte) {
		newInflightModel(t, ordered, 1+int(batch%8)).play(script[:min(len(script), 1000)])
	})
}

// Acks may wait only while the workers have at least half of a full load ready.
// A message that waits for its handler's limit is not overtaken by one that arrives when the handler becomes free.
func TestLimited_isNotOvertaken(t *testing.T) {
	t.Parallel()
	h := newInflightModel(t, false, 1)
	h.cfg.limiter = limitSlow(1)
	var all, begun []uuid.UUID
	put := func() {
		m := inbox.Message{ID: ids.New(), Name: "slow", Attempt: 1}
		all = append(all, m.ID)
		h.add(m, false)
	}
	put()
	put()
	for i := range 3 {
		j := h.inflight.queues.next(h.now, 10, h.alarm)
		if j == nil {
			t.Fatalf("no job after %d", i)
		}
		begun = append(begun, j.items[0].m.ID)
		if h.inflight.queues.next(h.now, 10, h.alarm) != nil { // the second message is held back
			t.Fatal("two jobs at once")
		}
		put()
		h.inflight.queues.ended(j, h.now)
	}
	if !slices.Equal(begun, all[:3]) {
		t.Errorf("begun %v, want %v", begun, all[:3])
	}
}

func TestAcksMayWait(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		running, queued int
		want            bool
	}{
		"enough":         {running: 4, queued: 2, want: true},
		"too little":     {running: 4, queued: 1},
		"nothing":        {running: 4},
		"nothing begun":  {queued: 2},
		"one of many":    {running: 1, queued: 2, want: true},
		"the last begun": {running: 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cfg := &settings{Config: Config{ConsumerConfig: inbox.ConsumerConfig{Concurrency: 4, Batch: 1, Prefetch: 16}}}
			h := newInflight(cfg)
			for range c.running {
				h.queues.limits.begin(&job{items: []*item{newItem()}})
			}
			for range c.queued {
				h.queues.ready(newItem())
			}
			a := &acks{cfg: cfg, next: &settlement{acks: []driver.Delivery{&delivered{}}}, spare: &settlement{}}
			a.due(time.Now(), h.queues.idle(), newAlarm())
			if got := a.next.mayWait; got != c.want {
				t.Errorf("may wait: %v, want %v", got, c.want)
			}
		})
	}
}

func TestRefusals(t *testing.T) {
	t.Parallel()
	var r refusals
	now := time.Unix(1_700_000_000, 0)
	if place, _, _ := r.latest(); place != "" {
		t.Errorf("%q refuses", place)
	}
	if !r.note("a", errTest, now) || r.note("a", errTest, now.Add(refusalLog)) || !r.note("a", errTest, now.Add(refusalLog+1)) {
		t.Error("a destination is logged every 30 seconds")
	}
	r.note("b", errTest, now.Add(time.Minute))
	if place, until, err := r.latest(); place != "b" || !errors.Is(err, errTest) || until != now.Add(time.Minute+refusalAge) {
		t.Errorf("%q, %v, %v", place, err, until)
	}
	last := time.Duration(0)
	for range 3000 {
		d := r.pause(now)
		if d < last || d > maxSlot {
			t.Fatalf("pause %v after %v", d, last)
		}
		last = d
	}
	if last != maxSlot {
		t.Errorf("the pauses of many grow to %v", last)
	}
	r.clear("b")
	if place, _, _ := r.latest(); place != "a" || r.pause(now) > time.Second {
		t.Errorf("%q still rejects after b was cleared", place)
	}
}

// TestRefused_goesOn follows a message that one destination after the other rejects.
func TestRefused_goesOn(t *testing.T) {
	t.Parallel()
	cfg := &settings{Config: Config{Queue: "q", ConsumerConfig: inbox.ConsumerConfig{Concurrency: 1, Prefetch: 10, Batch: 1, Rand: rand.Float64, Logger: slog.New(slog.DiscardHandler)}}}
	meters, err := newInstruments(cfg, nil)
	if err != nil {
		t.Fatal(err)
	}
	l := &loop{
		cfg: cfg, meters: meters, inflight: newInflight(cfg), outage: newOutage(cfg), drain: &drain{}, alarm: newAlarm(),
		acks: &acks{cfg: cfg, next: &settlement{}, spare: &settlement{}}, outbound: &outgoing{cfg: cfg},
	}
	it := newItem()
	now := time.Unix(1_700_000_000, 0)
	l.inflight.add(it, false, now)
	j := l.inflight.queues.next(now, 1, l.alarm)
	j.outcomes = []*outcome{{kind: failed, failure: driver.Failure{Err: errTest, Class: "validation"}, decision: driver.Decision{Action: driver.ActionDead}}}
	l.conclude(j, now)
	settle := func(err error) {
		t.Helper()
		r := l.outbound.batch(now, l.alarm)
		if r == nil || r.items[0] != it {
			t.Fatal("it is not moved")
		}
		l.outbound.taken(r, now)
		if l.outbound.batch(now, l.alarm) != nil {
			t.Fatal("it is moved twice")
		}
		r.errs = []error{err}
		l.moved(r, now)
	}
	if it.order.target != driver.ToDead {
		t.Fatalf("%+v", it.order)
	}
	settle(driver.ErrUnavailable)
	if l.outbound.batch(now, l.alarm) != nil {
		t.Error("it is moved again at once")
	}
	now = now.Add(time.Second)
	settle(driver.ErrRefused)
	if it.order.target != driver.ToLater || it.order.as != displaced || it.order.next.Attempt != 1 {
		t.Fatalf("%+v", it.order)
	}
	settle(errors.New("strange"))
	if it.order.target != driver.ToTail || it.state != delayed || len(l.inflight.delayed) != 1 {
		t.Fatalf("%+v", it.order)
	}
	now = it.due
	for _, due := range l.inflight.due(now, l.alarm) {
		l.out(due)
	}
	settle(driver.ErrRefused)
	if f := l.inflight; len(l.acks.next.backs) != 1 || f.all.n != 0 || f.waiting.n != 0 || len(l.outbound.pending)+len(l.outbound.under) != 0 {
		t.Errorf("%d requeued, %d in flight", len(l.acks.next.backs), f.all.n)
	}
}

func newItem() *item {
	d := &delivered{inbox.Message{ID: ids.New(), Name: "x", Attempt: 1}}
	return &item{d: d, m: d.Message(), session: &session{}, index: -1}
}

// TestOutage_model drives outages, poison messages and successes at random. The gate limits the messages, a
// pause ends after the outage does, and no message is at fault unless another one succeeded after it had
// failed, twice.
func TestOutage_model(t *testing.T) {
	t.Parallel()
	for range testenv.Sequences(t, 200) {
		cfg := &settings{Config: Config{ConsumerConfig: inbox.ConsumerConfig{
			Concurrency: 1 + rand.N(4), Prefetch: 50, Batch: 1, Rand: func() float64 { return 0.5 }, Logger: slog.New(slog.DiscardHandler),
		}}}
		o := newOutage(cfg)
		now := time.Unix(1_700_000_000, 0)
		poison := map[*item]int{} // how often others succeeded since it failed
		failedAt := map[*item]int{}
		events := 0
		down := rand.N(2) == 0
		for range 200 {
			now = now.Add(time.Duration(rand.N(200)) * time.Millisecond)
			events++
			if rand.N(40) == 0 {
				down = !down
			}
			before := o.gate
			for _, a := range o.step(now, time.Time{}, 100, newAlarm()) {
				if before == open && a.do == move && !o.struck(a.it) {
					t.Fatal("a message is moved away although none succeeded after it failed")
				}
			}
			if o.gate == shut && o.room(100) != 0 {
				t.Fatal("a shut gate lets messages through")
			}
			if before == shut && o.gate == probing {
				o.awaitMessages(now, probeWait)
			}
			if o.room(100) == 0 {
				continue
			}
			it := newItem()
			if len(poison) > 0 && rand.N(3) == 0 { // a redelivered one
				for known := range poison {
					it = known
					break
				}
			}
			_, bad := poison[it]
			if !bad && rand.N(5) == 0 {
				bad = true
				poison[it] = 0
			}
			o.begin(&job{items: []*item{it}, began: now})
			if o.gate == probing && o.begun > o.most {
				t.Fatalf("%d probes of %d", o.begun, o.most)
			}
			over := o.probeEnded(it, down || bad, !down && !bad)
			if down || bad {
				it.outcome = &outcome{kind: failed, failure: driver.Failure{Err: errTest}}
				o.forget([]*item{it})
				o.suspect(it, now)
				failedAt[it] = events
				continue
			}
			it.outcome = nil
			actions := o.succeeded(it, now)
			for known, at := range failedAt {
				if at < events {
					poison[known]++
					delete(failedAt, known)
				}
			}
			for _, a := range actions {
				if !a.it.outcome.unavailable() && a.it.outcome.decision.Counted && poison[a.it] < 2 {
					t.Fatalf("guilty after %d successes", poison[a.it])
				}
			}
			if over {
				o.reopen()
			}
		}
	}
}

var errTest = inbox.Unavailable(errSimple("down"))

type errSimple string

func (e errSimple) Error() string { return string(e) }

// A pause lasts 0.5 s, growing to 2 s. Its probes grow to one message per worker.
func TestOutage_schedule(t *testing.T) {
	t.Parallel()
	cfg := &settings{Config: Config{ConsumerConfig: inbox.ConsumerConfig{
		Concurrency: 6, Prefetch: 50, Rand: func() float64 { return 0.5 }, Logger: slog.New(slog.DiscardHandler),
	}}}
	o, wake := newOutage(cfg), newAlarm()
	now := time.Unix(1_700_000_000, 0)
	for i, want := range []struct {
		delay time.Duration
		most  int
	}{{500 * time.Millisecond, 1}, {time.Second, 2}, {2 * time.Second, 4}, {2 * time.Second, 6}, {2 * time.Second, 6}} {
		wake.reset(now)
		o.pause(now, wake)
		if o.at != now.Add(want.delay) || wake.at != o.at {
			t.Errorf("pause %d ends at %v and wakes at %v", i, o.at.Sub(now), wake.at.Sub(now))
		}
		now = o.at
		o.step(now, time.Time{}, 100, wake)
		if o.gate != probing || o.most != want.most || o.room(100) != 1 {
			t.Errorf("probe %d is of %d messages, %d at once", i, o.most, o.room(100))
		}
	}
	o.probe(6, 3)
	if o.most != 3 {
		t.Errorf("%d probes with 3 left", o.most)
	}
	o.reopen()
	it := newItem()
	it.outcome = &outcome{kind: failed, failure: driver.Failure{Err: errTest, Unavailable: true}}
	o.suspect(it, now)
	now = now.Add(controlPatience)
	if actions := o.step(now, time.Time{}, 100, wake); len(actions) != 1 || actions[0].do != rerun {
		t.Errorf("in doubt, the actions are %v", actions)
	}
	if o.most != 6 || o.paused() {
		t.Errorf("in doubt, %d messages are tried, and the consumer is paused: %v", o.most, o.paused())
	}
	o.pause(now, wake)
	if o.at != now.Add(500*time.Millisecond) || !o.paused() {
		t.Errorf("the first pause after a doubt ends at %v, and the consumer is paused: %v", o.at.Sub(now), o.paused())
	}
	for _, tt := range []struct {
		name     string
		after    time.Duration
		suspects int
		want     gate
		actions  int
	}{
		{"before anything arrived", probeWait - 1, 5, probing, 0},
		{"when nothing arrives", probeWait, 5, probing, 5},
		{"of an empty queue", probeWait, 0, open, 0},
	} {
		o.suspects = nil
		for range tt.suspects {
			o.suspects = append(o.suspects, newItem())
		}
		o.probe(6, 100)
		o.awaitMessages(now, probeWait)
		if actions := o.step(now.Add(tt.after), time.Time{}, 100, wake); o.gate != tt.want || len(actions) != tt.actions {
			t.Errorf("%s the gate is %d, with %d actions", tt.name, o.gate, len(actions))
		}
	}
}

// The transitions drawn in doc.go are those that inflight.to allows.
func TestDoc_drawsTheTransitions(t *testing.T) {
	t.Parallel()
	names := map[string]state{
		"arrived": arrived, "queued": queued, "ready": ready, "limited": limited, "running": running, "orphaned": orphaned,
		"suspected": suspected, "delayed": delayed, "outbound": outbound, "lost": lost, "done": done,
	}
	text, err := os.ReadFile("doc.go")
	if err != nil {
		t.Fatal(err)
	}
	want := map[state][]state{}
	for _, arrow := range regexp.MustCompile(`(?m)^//\t(\w+) ──▶ (\w+)  `).FindAllStringSubmatch(string(text), -1) {
		from, known1 := names[arrow[1]]
		to, known2 := names[arrow[2]]
		if !known1 || !known2 {
			t.Errorf("unknown state in %q", arrow[0])
		}
		want[from] = append(want[from], to)
	}
	for _, from := range []state{running, suspected, outbound} {
		want[from] = append(want[from], lost)
	}
	for from := queued; from <= lost; from++ {
		want[from] = append(want[from], done)
	}
	for from, to := range drawn {
		slices.Sort(want[state(from)])
		got := slices.Sorted(slices.Values(to))
		if !slices.Equal(got, want[state(from)]) {
			t.Errorf("from state %d: the code allows %v, doc.go draws %v", from, got, want[state(from)])
		}
	}
}
