package inboxamqp

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
)

// acks are acknowledgements as they were written.
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
		{done: []uint64{6, 8}, want: []string{"6 false", "8 false"}}, // 5 is still in work
		{settled: 7},
		{done: []uint64{5}, want: []string{"5 false"}}, // 6 to 8 are gone already
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

// What is done beyond a message in work waits for it, a limited number for a limited time.
func TestTagsWait(t *testing.T) {
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
		{done(19), nil},                                 // twice is once
		{func() { _ = s.settle(19, written.ack) }, nil}, // also in another way
		{done(18), []string{"19 true"}},
	} {
		written = nil
		step.do()
		if !slices.Equal(written, step.want) {
			t.Errorf("step %d: wrote %v, want %v", i, written, step.want)
		}
	}
}

// Beyond a tag that nobody has seen every delivery is acknowledged by itself.
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

// A broker that takes every acknowledgement literally sees each delivery settled once, and
// none that is still in work.
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
	var mu sync.Mutex // held by us while the deliveries are ours to settle
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
				t.Errorf("%d acknowledged in work, by %d %v", i, tag, multiple)
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
			t.Errorf("%d was left %q", i+1, got)
		}
	}
	if len(s.ended)+len(s.waiting)+s.late != 0 {
		t.Errorf("kept: %d of the tags, %d that wait, %d of them late", len(s.ended), len(s.waiting), s.late)
	}
}
