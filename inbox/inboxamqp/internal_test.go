package inboxamqp

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"
	"unicode/utf8"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/internal/wire"
)

// acks records acknowledgements.
type acks []string

func (a *acks) ack(tag uint64, multiple bool) error {
	*a = append(*a, fmt.Sprint(tag, multiple))
	return nil
}

func TestTags(t *testing.T) {
	t.Parallel()
	var written acks
	var s tags
	for tag := range uint64(10) {
		s.add(tag + 1)
	}
	for _, step := range []struct {
		done    []uint64
		settled uint64
		want    []string
	}{
		{done: []uint64{1}, want: []string{"1 false"}},
		{done: []uint64{2, 3, 4}, want: []string{"4 true"}},
		{done: []uint64{6, 8}, want: []string{"6 false", "8 false"}}, // 5 is still in flight
		{settled: 7},
		{done: []uint64{5}, want: []string{"5 false"}}, // 6 to 8 are settled already
		{settled: 9},
		{done: []uint64{10}, want: []string{"10 false"}},
	} {
		written = nil
		if step.settled != 0 {
			_ = s.settle(step.settled, written.ack)
		}
		if step.done != nil {
			_, _ = s.acknowledge(step.done, 0, written.ack)
		}
		if !slices.Equal(written, step.want) {
			t.Errorf("%v, %d: wrote %v, want %v", step.done, step.settled, written, step.want)
		}
	}
}

// A tag done after a tag in flight waits for it: a limited number of tags, for a limited time.
func TestTags_waitIsBounded(t *testing.T) {
	t.Parallel()
	const most = 3
	var written acks
	var s tags
	for tag := range uint64(20) {
		s.add(tag + 1)
	}
	done := func(tags ...uint64) func() { return func() { _, _ = s.acknowledge(tags, most, written.ack) } }
	hasten := func(waits bool) func() {
		return func() {
			if got, _ := s.hasten(written.ack); got != waits {
				t.Errorf("after %v: waits: %v", written, got)
			}
		}
	}
	for i, step := range []struct {
		do   func()
		want []string
	}{
		{done(2, 3), nil},
		{done(1), []string{"3 true"}},
		{done(5, 6), nil},
		{func() { _ = s.settle(4, written.ack) }, []string{"6 true"}},
		{done(8), nil},
		{hasten(true), nil},
		{done(9), nil},
		{hasten(true), []string{"8 false"}},
		{done(7), []string{"9 true"}},
		{hasten(false), nil},
		{done(11, 13), nil},
		{done(15, 17), []string{"11 false", "13 false", "15 false", "17 false"}},
		{done(12), nil},
		{func() { _ = s.flush(written.ack) }, []string{"12 false"}},
		{done(10), []string{"10 false"}},
		{done(14, 16), []string{"16 true"}},
		{done(19), nil},
		{done(19), nil},                                 // done twice counts once
		{func() { _ = s.settle(19, written.ack) }, nil}, // settled as well
		{done(18), []string{"19 true"}},
	} {
		written = nil
		step.do()
		if !slices.Equal(written, step.want) {
			t.Errorf("step %d: wrote %v, want %v", i, written, step.want)
		}
	}
}

// After a gap in the tags, each delivery is acknowledged separately.
func TestTagsGap(t *testing.T) {
	t.Parallel()
	var written acks
	var s tags
	for _, tag := range []uint64{1, 2, 4, 5} {
		s.add(tag)
	}
	_, _ = s.acknowledge([]uint64{1, 2, 4, 5}, 0, written.ack)
	if want := []string{"2 true", "4 false", "5 false"}; !slices.Equal(written, want) {
		t.Errorf("wrote %v, want %v", written, want)
	}
}

// A broker that applies every acknowledgement literally must see each delivery settled once, and none that is
// still in flight.
func TestTagsModel(t *testing.T) {
	t.Parallel()
	for _, most := range []int{0, 5, 100} {
		t.Run(fmt.Sprint(most), func(t *testing.T) {
			t.Parallel()
			modelTags(t, most)
		})
	}
}

func modelTags(t *testing.T, most int) {
	const n, workers = 2000, 8
	var s tags
	state := make([]string, n+1)
	var mu sync.Mutex // held while the deliveries may be settled
	ack := func(tag uint64, multiple bool) error {
		mu.Lock()
		defer mu.Unlock()
		first := tag
		if multiple {
			first = 1
		}
		for i := first; i <= tag; i++ {
			switch {
			case state[i] == "done":
				state[i] = "acked"
			case state[i] == "acked" && i == tag:
				t.Errorf("%d acknowledged twice", i)
			case state[i] == "":
				t.Errorf("%d acknowledged in flight, by %d %v", i, tag, multiple)
			}
		}
		return nil
	}
	for tag := range uint64(n) {
		s.add(tag + 1)
	}
	order := rand.Perm(n)
	for i := range order { // nearly sorted, as workers finish
		j := min(i+rand.IntN(20), n-1)
		order[i], order[j] = order[j], order[i]
	}
	slices.SortFunc(order, func(a, b int) int { return a/40 - b/40 })
	var wg sync.WaitGroup
	next := make(chan []int)
	for range workers {
		wg.Go(func() {
			for batch := range next {
				var done []uint64
				for _, i := range batch {
					tag := uint64(i + 1)
					mu.Lock()
					if i%17 == 0 {
						state[tag] = "returned"
					} else {
						state[tag] = "done"
						done = append(done, tag)
					}
					mu.Unlock()
					if i%17 == 0 {
						_ = s.settle(tag, ack)
					}
				}
				_, _ = s.acknowledge(done, most, ack)
				if batch[0]%5 == 0 {
					_, _ = s.hasten(ack)
				}
			}
		})
	}
	for batch := range slices.Chunk(order, 13) {
		next <- batch
	}
	close(next)
	wg.Wait()
	_ = s.flush(ack)
	for i, got := range state[1:] {
		if got == "done" || got == "" {
			t.Errorf("%d ended as %q", i+1, got)
		}
	}
	if len(s.ended)+len(s.waiting)+s.late != 0 {
		t.Errorf("kept: %d tags, %d waiting, %d of them late", len(s.ended), len(s.waiting), s.late)
	}
}

// Making room in a copy must not remove its id.
func TestStampHeader(t *testing.T) {
	t.Parallel()
	const stamp = `[{"messageId":"018f8fad-5bd9-7b46-8f16-570867728950"}]`
	for name, tt := range map[string]struct {
		headers amqp.Table
		want    string
	}{
		"bare":    {amqp.Table{"X-Message-Stamp-MessageIdStamp": stamp, "x": stamp}, "X-Message-Stamp-MessageIdStamp"},
		"another": {amqp.Table{`X-Message-Stamp-App\Uid`: []byte(stamp), `X-Message-Stamp-App\MessageIdStamp`: "[]"}, `X-Message-Stamp-App\Uid`},
		"Symfony's": {
			amqp.Table{`X-Message-Stamp-A\CausationStamp`: `[{"id":"018f8fad-5bd9-7b46-8f16-570867728950"}]`, `X-Message-Stamp-S\MessageIdStamp`: `[{"id":"018f8fad-5bd9-7b46-8f16-570867728950"}]`},
			`X-Message-Stamp-S\MessageIdStamp`,
		},
		"none": {amqp.Table{"x": stamp}, ""},
	} {
		if got := stampHeader(tt.headers); got != tt.want {
			t.Errorf("%s: %s, want %s", name, got, tt.want)
		}
	}
}

// Conversion must not panic for any message, and must not pass on headers that are not text.
func FuzzConvert(f *testing.F) {
	f.Add("id", "type", "[{}]", "1", "2026-01-01T00:00:00Z", []byte("raw"), int64(3))
	f.Add("018f8fad-5bd9-7b46-8f16-570867728950", "", `[{"messageId":"x"}]`, "99999999999999999999", "", []byte{0xff}, int64(-1))
	f.Fuzz(func(t *testing.T, id, name, stamp, attempt, failed string, raw []byte, n int64) {
		d := amqp.Delivery{MessageId: id, Type: name, Body: raw, Headers: amqp.Table{
			"X-Message-Stamp-MessageIdStamp": stamp, wire.HeaderAttempt: attempt, wire.HeaderFirstFailed: failed, wire.HeaderWait: n,
			wire.HeaderType: raw, "raw": raw, "list": []any{raw, n}, "table": amqp.Table{"n": n}, "none": nil, attempt: n,
		}}
		m := convert(d, "q", &wire.Symfony{})
		if m.Attempt < 1 || m.Attempt > maxAttempt {
			t.Errorf("attempt %d", m.Attempt)
		}
		for key, value := range m.Headers {
			if !utf8.ValidString(value) {
				t.Errorf("header %q: %q", key, value)
			}
		}
		if wait := waitHeader(d, 1000); wait < 0 || wait > 1000 {
			t.Errorf("wait %v", wait)
		}
		if dead := readDead(d, "default", &wire.Symfony{}); dead.Attempts != m.Attempt {
			t.Errorf("dead letter %+v", dead)
		}
	})
}

// The documentation promises these defaults. No other test would notice a change.
func TestDefaults(t *testing.T) {
	t.Parallel()
	c := newSettings(Queue{Name: "orders"}, nil, inbox.ConsumerConfig{}, tuning{})
	for name, value := range map[string][2]any{
		"Concurrency":     {c.Concurrency, 8},
		"Prefetch":        {c.Prefetch, 16},
		"Timeout":         {c.Timeout, 5 * time.Second},
		"confirmTimeout":  {c.confirmTimeout, 15 * time.Second},
		"HandlerTimeout":  {c.HandlerTimeout, time.Minute},
		"MaxCrashes":      {c.MaxCrashes, 5},
		"retention":       {c.memory.Retention, 8 * 24 * time.Hour},
		"Name":            {c.ConsumerConfig.Name, "orders"},
		"ShutdownTimeout": {c.ShutdownTimeout, time.Minute},
		"MaxAttempts":     {c.Retry.MaxAttempts, 6},
		"BaseDelay":       {c.Retry.BaseDelay, time.Second},
		"MaxDelay":        {c.Retry.MaxDelay, time.Minute},
	} {
		if value[0] != value[1] {
			t.Errorf("%s is %v, want %v", name, value[0], value[1])
		}
	}
}

// The window of a scan stays small for large messages, and grows slowly for small ones.
func TestNextWindow_boundsBytes(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ before, largest, want int }{
		{0, 0, 4}, {4, 100, 8}, {8, 0, 16}, {16, 100, 16}, {4, 4 << 20, 2}, {16, 16 << 20, 1}, {1, 16 << 20, 1},
	} {
		if got := nextWindow(tt.before, tt.largest); got != tt.want {
			t.Errorf("after %d letters of up to %d bytes: %d, want %d", tt.before, tt.largest, got, tt.want)
		}
	}
}

// A delay takes a step that is at most 1.5 times and 1.5 s longer and never shorter, or a shorter step and the
// rest.
func TestCover(t *testing.T) {
	t.Parallel()
	for d := time.Millisecond; d < 48*time.Hour; d += d/50 + time.Millisecond {
		step, rest := cover(d)
		if rest == 0 && (step < d || step > d+d/2+1500*time.Millisecond) || rest > 0 && step+rest != d {
			t.Errorf("%v waits in a step of %v, then for %v", d, step, rest)
		}
	}
	for _, tt := range []struct{ d, step, rest time.Duration }{
		{0, 100 * time.Millisecond, 0},
		{800 * time.Millisecond, time.Second, 0},
		{60 * time.Second, 64 * time.Second, 0},
		{70 * time.Second, 64 * time.Second, 6 * time.Second}, // the next one is two minutes
		{time.Hour, 16 * time.Minute, 44 * time.Minute},
	} {
		if step, rest := cover(tt.d); step != tt.step || rest != tt.rest {
			t.Errorf("%v waits in a step of %v, then for %v", tt.d, step, rest)
		}
	}
}
