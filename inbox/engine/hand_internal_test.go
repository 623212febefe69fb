package engine

import (
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
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

// handModel plays with a hand and knows what it must and must not do.
type handModel struct {
	t       *testing.T
	cfg     *settings
	hand    *hand
	now     time.Time
	session *session

	lanes   map[string][]uuid.UUID // what is in hand of each key, in its order
	items   map[uuid.UUID]bool     // what is in hand
	running []*job
	solo    *job
	soloAt  time.Time
	gone    map[uuid.UUID]bool
}

func newHandModel(t *testing.T, ordered bool, batch int) *handModel {
	t.Helper()
	cfg := &settings{Config: Config{ConsumerConfig: inbox.ConsumerConfig{
		Ordered: ordered, Concurrency: 3, Batch: batch, Prefetch: 100,
	}}, limiter: limitSlow(2)}
	return &handModel{
		t: t, cfg: cfg, hand: newHand(cfg), now: time.Unix(1_700_000_000, 0), session: &session{},
		lanes: map[string][]uuid.UUID{}, items: map[uuid.UUID]bool{}, gone: map[uuid.UUID]bool{},
	}
}

func (h *handModel) add(m inbox.Message, again bool) {
	it := &item{d: &delivered{m}, session: h.session}
	it.m = it.d.Message()
	if h.cfg.Ordered {
		it.key = m.Key
	}
	twinRuns := again && h.hand.orphans[it.twin()] != nil
	h.hand.add(it, h.now)
	if twinRuns {
		return
	}
	h.items[m.ID] = true
	if it.key != "" {
		h.lanes[it.key] = append(h.lanes[it.key], m.ID)
	}
}

// begin starts what may start, and checks that it may.
func (h *handModel) begin(room int) {
	for room > 0 {
		j := h.hand.queues.next(h.now, room)
		if j == nil {
			return
		}
		room -= len(j.items)
		h.check(j, room)
		h.running = append(h.running, j)
	}
	if j := h.hand.queues.next(h.now, 0); j != nil {
		h.t.Fatal("began with no room")
	}
}

func (h *handModel) check(j *job, room int) {
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
		if !h.items[it.m.ID] || it.state != running || it.single && len(j.items) > 1 {
			h.t.Fatalf("%+v begins", it)
		}
		if it.key != "" && h.lanes[it.key][0] != it.m.ID {
			h.t.Fatal("a message of a key overtakes another")
		}
	}
}

// end ends a job, each message as the outcome says.
func (h *handModel) end(i, outcome int) {
	j := h.running[i]
	h.running = slices.Delete(h.running, i, i+1)
	if h.solo == j {
		h.solo = nil
	}
	h.hand.queues.ended(j, h.now)
	for _, it := range j.items {
		switch {
		case it.orphan: // it comes again, if it has not yet
			h.hand.gone(it)
			h.leave(it)
		case outcome == 1:
			it.single = true
			h.hand.crowd.add(it)
			h.hand.hold(it, h.now.Add(7*time.Second))
		case outcome == 2 && len(j.items) == 1 && !it.alone:
			it.alone = true
			h.hand.queues.ready(it)
		default:
			h.hand.gone(it)
			if h.gone[it.m.ID] {
				h.t.Fatal("a message ends twice")
			}
			h.gone[it.m.ID] = true
			h.leave(it)
		}
	}
	h.hand.queues.done(j)
}

func (h *handModel) leave(it *item) {
	delete(h.items, it.m.ID)
	h.lanes[it.key] = slices.DeleteFunc(h.lanes[it.key], func(id uuid.UUID) bool { return id == it.m.ID })
}

// cut ends the session; all that is unsettled comes again in its order, some of it after a while.
func (h *handModel) cut() {
	var again []inbox.Message
	for it := h.hand.all.head; it != nil; it = it.next {
		again = append(again, *it.d.Message())
	}
	h.hand.drop(h.now)
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

// finish lets all that is in hand end, with nothing but what wake tells.
func (h *handModel) finish() {
	for steps := 0; h.hand.all.n > 0; steps++ {
		if steps > 10_000 {
			h.t.Fatalf("%d items never end", h.hand.all.n)
		}
		h.hand.due(h.now)
		h.begin(1 << 20)
		if len(h.running) > 0 {
			h.end(0, 0)
			continue
		}
		at := earlier(h.hand.wake(), h.hand.queues.wake(h.now))
		if at.IsZero() {
			h.t.Fatalf("%d items wait for nothing", h.hand.all.n)
		}
		h.now = at
	}
	if c := h.hand.crowd; c.n != 0 || c.bytes != 0 || c.now != 0 || len(h.hand.keys) != 0 || len(h.hand.timed) != 0 {
		h.t.Fatalf("an empty hand has %+v, %d keys, %d held", c, len(h.hand.keys), len(h.hand.timed))
	}
}

func (h *handModel) play(script []byte) {
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
			h.hand.due(h.now)
		}
		h.count()
	}
	h.finish()
}

// count compares what the hand says with what is in it.
func (h *handModel) count() {
	begun, waiting := 0, 0
	for it := h.hand.all.head; it != nil; it = it.next {
		if it.state == running {
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
	if begun != want || waiting != h.hand.crowd.n || len(h.hand.queues.limits.jobs) != len(h.running) {
		h.t.Fatalf("%d of %d run, %d wait, %d by the count", begun, want, waiting, h.hand.crowd.n)
	}
}

// TestHandModel plays with hands at random.
func TestHandModel(t *testing.T) {
	t.Parallel()
	for range testenv.Sequences(t, 500) {
		script := make([]byte, rand.N(200))
		for i := range script {
			script[i] = byte(rand.Uint32())
		}
		newHandModel(t, rand.N(2) == 0, []int{1, 4}[rand.N(2)]).play(script)
	}
}

func FuzzHand(f *testing.F) {
	f.Add(true, byte(4), []byte{0, 8, 32, 4, 5, 7})
	f.Fuzz(func(t *testing.T, ordered bool, batch byte, script []byte) {
		newHandModel(t, ordered, 1+int(batch%8)).play(script[:min(len(script), 1000)])
	})
}

// Acknowledgements may wait only while the workers have half of what they take at once to do next.
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
			h := newHand(cfg)
			r := &receipts{cfg: cfg, hand: h, next: &settlement{acks: []driver.Delivery{&delivered{}}}, spare: &settlement{}}
			for range c.running {
				h.queues.limits.begin(&job{items: []*item{newItem()}})
			}
			for range c.queued {
				h.queues.ready(newItem())
			}
			if got := r.outgoing().mayWait; got != c.want {
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
		t.Error("a place is named every 30 seconds")
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
	if last != maxSlot || !r.clear("b") || r.clear("b") || r.pause(now) > time.Second {
		t.Errorf("the pauses of many grow to %v", last)
	}
}

// TestRefusedGoesOn follows a message whose places refuse it one after the other.
func TestRefusedGoesOn(t *testing.T) {
	t.Parallel()
	cfg := &settings{Config: Config{Queue: "q", ConsumerConfig: inbox.ConsumerConfig{Concurrency: 1, Prefetch: 10, Batch: 1, Rand: rand.Float64, Logger: slog.New(slog.DiscardHandler)}}}
	signals, err := newSignals(cfg, nil)
	if err != nil {
		t.Fatal(err)
	}
	h := newHand(cfg)
	v := &moves{cfg: cfg, hand: h, receipts: &receipts{cfg: cfg, hand: h, signals: signals, next: &settlement{}, spare: &settlement{}}}
	it := newItem()
	now := time.Unix(1_700_000_000, 0)
	h.add(it, now)
	f := &fate{kind: hasFailed, failure: driver.Failure{Err: errTest, Class: "validation"}, decision: driver.Decision{Action: driver.ActionDead}}
	it.fate = f
	v.send(it, send(cfg, it.m, f), now)
	settle := func(err error) {
		t.Helper()
		r := v.batch(now)
		if r == nil || r.items[0] != it {
			t.Fatal("it is not moved")
		}
		v.taken(r, now)
		if v.batch(now) != nil {
			t.Fatal("it is moved twice")
		}
		r.errs = []error{err}
		v.moved(r, now)
	}
	if it.order.target != driver.ToDead {
		t.Fatalf("%+v", it.order)
	}
	settle(driver.ErrUnavailable)
	if v.batch(now) != nil {
		t.Error("at once again")
	}
	now = now.Add(time.Second)
	settle(driver.ErrRefused)
	if it.order.target != driver.ToLater || it.order.outcome != displaced || it.order.next.Attempt != 1 {
		t.Fatalf("%+v", it.order)
	}
	settle(errors.New("strange"))
	if it.order.target != driver.ToTail || it.state != held || len(h.timed) != 1 {
		t.Fatalf("%+v", it.order)
	}
	now = it.due
	for _, due := range h.due(now) {
		v.due(due)
	}
	settle(driver.ErrRefused)
	if len(v.receipts.next.backs) != 1 || h.all.n != 0 || h.crowd.n != 0 || len(v.pending)+len(v.under) != 0 {
		t.Errorf("%d given back, %d in hand", len(v.receipts.next.backs), h.all.n)
	}
}

func newItem() *item {
	d := &delivered{inbox.Message{ID: ids.New(), Name: "x", Attempt: 1}}
	return &item{d: d, m: d.Message(), session: &session{}, index: -1}
}

// TestPauseModel plays outages, poisons and passes at random: the gate lets only so many through, a
// pause ends after the outage does, and no message is found guilty unless another passed after it
// had failed, twice.
func TestPauseModel(t *testing.T) {
	t.Parallel()
	for range testenv.Sequences(t, 200) {
		cfg := &settings{Config: Config{ConsumerConfig: inbox.ConsumerConfig{Concurrency: 1 + rand.N(4), Prefetch: 50, Batch: 1}}}
		tr, p := newTrial(cfg), &pause{cfg: cfg}
		now := time.Unix(1_700_000_000, 0)
		poison := map[*item]int{} // how often it was controlled since it failed
		failedAt := map[*item]int{}
		events := 0
		down := rand.N(2) == 0
		for range 200 {
			now = now.Add(time.Duration(rand.N(200)) * time.Millisecond)
			events++
			if rand.N(40) == 0 {
				down = !down
			}
			switch p.gate {
			case open:
				outage, inDoubt, spared := tr.judge(now, time.Time{})
				switch {
				case outage:
					p.shut(now, 0.5)
				case inDoubt:
					p.doubt(100)
					p.listen(now, probeGap)
					tr.release()
				default:
					for _, it := range spared {
						if !tr.struck(it) {
							t.Fatal("a message is sent away that was never controlled")
						}
					}
				}
			case shut:
				if p.room(100) != 0 {
					t.Fatal("a shut gate lets messages through")
				}
				if !now.Before(p.at) {
					p.probe(100)
					p.listen(now, probeWait)
				}
			case probing:
				switch p.verdict(now, len(tr.held)) {
				case undecided:
					p.grow(now)
				case stillDown:
					p.shut(now, 0.5)
				case nothingDown:
					p.reopen()
					tr.release()
				case noOther:
					p.inPlace = true
					p.listen(now, probeGap)
					tr.release()
				}
			}
			if p.room(100) == 0 {
				continue
			}
			it := newItem()
			if len(poison) > 0 && rand.N(3) == 0 { // one that comes again
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
			j := &job{items: []*item{it}, began: now}
			p.begin(j)
			tr.begin(j)
			if p.gate == probing && p.begun > p.most {
				t.Fatalf("%d probes of %d", p.begun, p.most)
			}
			over := p.probed(it, down || bad, !down && !bad)
			if down || bad {
				it.fate = &fate{kind: hasFailed, failure: driver.Failure{Err: errTest}}
				tr.take(func(other *item) bool { return other == it })
				tr.failed(it, now)
				failedAt[it] = events
				continue
			}
			guilty, _ := tr.passed(it)
			for known, at := range failedAt {
				if at < events {
					poison[known]++
					delete(failedAt, known)
				}
			}
			for _, g := range guilty {
				if poison[g] < 2 {
					t.Fatalf("guilty after %d controls", poison[g])
				}
			}
			if over {
				p.reopen()
				tr.release()
			}
		}
	}
}

var errTest = inbox.Unavailable(errSimple("down"))

type errSimple string

func (e errSimple) Error() string { return string(e) }

// A pause lasts 0.5 s, growing to 2 s, and its probes grow to one for each worker.
func TestPauseSchedule(t *testing.T) {
	t.Parallel()
	cfg := &settings{Config: Config{ConsumerConfig: inbox.ConsumerConfig{Concurrency: 6}}}
	p := &pause{cfg: cfg}
	now := time.Unix(1_700_000_000, 0)
	for i, want := range []struct {
		delay time.Duration
		most  int
	}{{500 * time.Millisecond, 1}, {time.Second, 2}, {2 * time.Second, 4}, {2 * time.Second, 6}, {2 * time.Second, 6}} {
		if delay := p.shut(now, 0.5); delay != want.delay || p.wake() != now.Add(delay) {
			t.Errorf("pause %d lasts %v until %v", i, delay, p.wake())
		}
		p.probe(100)
		if p.most != want.most || p.room(100) != 1 {
			t.Errorf("probe %d is of %d messages, %d at once", i, p.most, p.room(100))
		}
	}
	p.probe(3)
	if p.most != 3 {
		t.Errorf("%d probes with 3 left", p.most)
	}
	p.reopen()
	p.doubt(100)
	if p.most != 6 || p.on() {
		t.Errorf("in doubt, %d messages are tried, and the pause is on: %v", p.most, p.on())
	}
	if delay := p.shut(now, 0.5); delay != 500*time.Millisecond || !p.on() {
		t.Errorf("the first pause after a doubt lasts %v, and is on: %v", delay, p.on())
	}
	p.probe(100)
	p.listen(now, probeWait)
	if got := p.verdict(now.Add(probeWait-1), 5); got != undecided {
		t.Errorf("verdict %d before anything arrived", got)
	}
	if got := p.verdict(now.Add(probeWait), 5); got != noOther {
		t.Errorf("verdict %d when nothing arrives", got)
	}
	if got := p.verdict(now.Add(probeWait), 0); got != nothingDown {
		t.Errorf("verdict %d of an empty queue", got)
	}
}
