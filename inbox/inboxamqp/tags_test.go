package inboxamqp

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
)

func TestTags(t *testing.T) {
	t.Parallel()
	var written []string
	ack := func(tag uint64, multiple bool) error {
		written = append(written, fmt.Sprint(tag, multiple))
		return nil
	}
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
			s.settle(step.settled)
		}
		if step.done != nil {
			_ = s.acknowledge(step.done, ack)
		}
		if !slices.Equal(written, step.want) {
			t.Errorf("%v, %d: wrote %v, want %v", step.done, step.settled, written, step.want)
		}
	}
}

// Beyond a tag that nobody has seen every delivery is acknowledged by itself.
func TestTagsGap(t *testing.T) {
	t.Parallel()
	var written []string
	ack := func(tag uint64, multiple bool) error {
		written = append(written, fmt.Sprint(tag, multiple))
		return nil
	}
	var s tags
	for _, tag := range []uint64{1, 2, 4, 5} {
		s.add(tag)
	}
	_ = s.acknowledge([]uint64{1, 2, 4, 5}, ack)
	if want := []string{"2 true", "4 false", "5 false"}; !slices.Equal(written, want) {
		t.Errorf("wrote %v, want %v", written, want)
	}
}

// A broker that takes every acknowledgement literally sees each delivery settled once, and
// none that is still in work.
func TestTagsModel(t *testing.T) {
	t.Parallel()
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
						s.settle(tag)
					}
				}
				_ = s.acknowledge(done, ack)
			}
		})
	}
	for batch := range slices.Chunk(order, 13) {
		next <- batch
	}
	close(next)
	wg.Wait()
	for i, got := range state[1:] {
		if got == "done" || got == "" {
			t.Errorf("%d was left %q", i+1, got)
		}
	}
	if len(s.states) != 0 {
		t.Errorf("%d states kept", len(s.states))
	}
}
