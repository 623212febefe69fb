package inboxamqp

import (
	"sync"
	"time"
)

const (
	// attention is how long a worker waits for what becomes of a failed message.
	attention = time.Second

	// maxAside and maxAsideBytes bound the messages that wait without a worker.
	maxAside      = 1000
	maxAsideBytes = 64 << 20
)

// aside holds messages that wait without a worker, for a confirm for example, so that those
// behind them go on.
type aside struct {
	all sync.WaitGroup

	mu       sync.Mutex
	closed   bool
	messages int
	bytes    int
}

// place is that of one message. Its other fields are the aside's.
type place struct {
	bytes       int
	free        chan struct{} // closed when the worker need not attend any more
	taken, over bool
}

// enter frees the worker of a message that waits, and reports whether there was a place for it, or
// none is needed any more.
func (a *aside) enter(p *place) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	switch {
	case p.over, p.taken:
		return true
	case a.messages >= maxAside || a.bytes+p.bytes > maxAsideBytes && a.messages > 0:
		return false
	}
	p.taken = true
	close(p.free)
	a.messages++
	a.bytes += p.bytes
	return true
}

func (a *aside) leave(p *place) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if p.over = true; p.taken {
		a.messages--
		a.bytes -= p.bytes
	}
}

// start runs work on a goroutine that close waits for. After close it runs at once.
func (a *aside) start(work func()) {
	a.mu.Lock()
	late := a.closed
	if !late {
		a.all.Go(work)
	}
	a.mu.Unlock()
	if late {
		work()
	}
}

// close waits for the work under way.
func (a *aside) close() {
	a.mu.Lock()
	a.closed = true
	a.mu.Unlock()
	a.all.Wait()
}

// attend has work done and waits for it: until its place is free, for a moment at most, or to its
// end when too many messages wait already.
func (a *aside) attend(p *place, work func()) {
	done := make(chan struct{})
	a.start(func() {
		defer close(done)
		defer a.leave(p)
		work()
	})
	timer := time.NewTimer(attention)
	defer timer.Stop()
	select {
	case <-done:
		return
	case <-p.free:
		return
	case <-timer.C:
	}
	if !a.enter(p) {
		<-done
	}
}
