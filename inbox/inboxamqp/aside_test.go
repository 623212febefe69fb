package inboxamqp

import (
	"testing"
	"testing/synctest"
	"time"
)

func TestAsideIsWaitedFor(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var a aside
		ended := false
		a.start(func() {
			time.Sleep(time.Minute)
			ended = true
		})
		began := time.Now()
		a.close()
		if took := time.Since(began); took != time.Minute || !ended {
			t.Errorf("close took %v, work ended: %v", took, ended)
		}
		late := false
		a.start(func() { late = true })
		if !late {
			t.Error("work after close was left to a goroutine")
		}
	})
}

func TestAsideIsBounded(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct{ size, want int }{
		"small ones": {1, maxAside},
		"large ones": {maxAsideBytes / 4, 4},
		"a huge one": {2 * maxAsideBytes, 1},
	} {
		var a aside
		var places []*place
		for range tt.want {
			p := &place{bytes: tt.size, free: make(chan struct{})}
			if !a.enter(p) {
				t.Errorf("%s: only %d have a place", name, len(places))
			}
			places = append(places, p)
		}
		over := &place{bytes: tt.size, free: make(chan struct{})}
		if a.enter(over) {
			t.Errorf("%s: more than %d have a place", name, tt.want)
		}
		a.leave(over)
		a.leave(places[0])
		if !a.enter(&place{bytes: tt.size, free: make(chan struct{})}) {
			t.Errorf("%s: a place that was left is not free", name)
		}
		if over := (&place{over: true}); !a.enter(over) || over.taken {
			t.Errorf("%s: one that is over takes a place", name)
		}
	}
}
