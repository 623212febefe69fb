package page

import (
	"context"
	"errors"
	"html/template"
	"sync"
	"time"
)

const (
	// patience is how long a request waits for its read. Then it shows the results so far.
	patience = 150 * time.Millisecond
	// readTime bounds a read: RabbitMQ needs a minute for 100,000 dead letters.
	readTime = 10 * time.Minute
	// abandonAfter is when a read ends whose results nobody requests.
	abandonAfter = 15 * time.Second
	// newFor is how long results need no note of their age.
	newFor = 5 * time.Second
	// stopPatience is how long stop waits for the reads.
	stopPatience = 5 * time.Second
	// maxReads bounds the reads that run or whose results are kept.
	maxReads = 16
)

// reads are the reads of views. A read continues after the answer to its request, so that no request waits for a queue with
// very many dead letters. Requests for the same view share a read. Results are kept only if they took long.
type reads struct {
	mu     sync.Mutex
	all    map[string]*read
	closed bool
}

// read is one read, and its results.
type read struct {
	ctx     context.Context
	cancel  context.CancelFunc
	abandon *time.Timer
	done    chan struct{}

	mu    sync.Mutex
	state results
}

// progress is the progress of a read, as views show it.
type progress struct {
	Reading bool // this is a part
	Began   time.Time
	// AsOf is the time of kept results; zero: they are new, or not complete.
	AsOf time.Time
	// Address is the address of the view. It reads again unless the read still runs.
	Address template.URL
}

// progress returns the progress of a read for the view at an address.
func (r results) progress(address string) progress {
	p := progress{Reading: r.Running(), Began: r.Began}
	if r.fresh() {
		address += "&again=1"
		if time.Since(r.Ended) > newFor {
			p.AsOf = r.Ended
		}
	}
	p.Address = template.URL(address)
	return p
}

// results are the results of a read so far.
type results struct {
	found any
	more  bool
	err   error
	// Began and Ended are its times. A zero Ended means that it still runs.
	Began, Ended time.Time
}

// Running reports whether the read has not ended.
func (r results) Running() bool { return r.Ended.IsZero() }

// slow reports whether the read took so long that its results are kept.
func (r results) slow() bool { return r.Ended.Sub(r.Began) > patience }

// fresh reports whether the results of a read that has ended are still shown: for five times as long as it took. A failure
// is shown for 10 s, so that the next request does not start another read. A cancelled read has no results.
func (r results) fresh() bool {
	const least, most = 10 * time.Second, 5 * time.Minute
	keep := least
	if r.err == nil {
		keep = min(max(5*r.Ended.Sub(r.Began), least), most)
	}
	return !r.Running() && r.slow() && !errors.Is(r.err, context.Canceled) && time.Since(r.Ended) < keep
}

// finder finds something. While it runs, it calls soFar with the results up to then.
type finder func(ctx context.Context, soFar func(found any)) (found any, more bool, err error)

// errReads means that a read cannot start.
var errReads = errors.New("too many views are being read: wait until one has ended")

// results returns the results of the read with a key. It starts the read, or waits for the running one, for a short time.
// again ignores kept results.
func (r *reads) results(ctx context.Context, key string, again bool, find finder) results {
	one, err := r.open(key, again, find)
	if err != nil {
		return results{err: err, Ended: time.Now()}
	}
	wait := time.NewTimer(patience)
	defer wait.Stop()
	select {
	case <-one.done:
	case <-wait.C:
	case <-ctx.Done():
	}
	now := one.snapshot()
	if !now.Running() && !now.fresh() {
		r.mu.Lock()
		defer r.mu.Unlock()
		if r.all[key] == one {
			delete(r.all, key)
		}
	}
	return now
}

// open returns the read with a key, and starts it if there is none.
func (r *reads) open(key string, again bool, find finder) (*read, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for other, one := range r.all {
		if s := one.snapshot(); !s.Running() && (!s.fresh() || again && other == key || len(r.all) >= maxReads) {
			delete(r.all, other)
		}
	}
	if one := r.all[key]; one != nil {
		if one.ctx.Err() == nil || !one.snapshot().Running() {
			one.abandon.Reset(abandonAfter)
			return one, nil
		}
		delete(r.all, key) // it was cancelled, and has not ended yet
	}
	switch {
	case r.closed:
		return nil, errEnding
	case len(r.all) >= maxReads:
		return nil, errReads
	}
	ctx, cancel := context.WithTimeout(context.Background(), readTime)
	one := &read{ctx: ctx, cancel: cancel, abandon: time.AfterFunc(abandonAfter, cancel), done: make(chan struct{}), state: results{Began: time.Now()}}
	if r.all == nil {
		r.all = map[string]*read{}
	}
	r.all[key] = one
	go one.run(ctx, find)
	return one, nil
}

func (o *read) run(ctx context.Context, find finder) {
	defer close(o.done)
	defer o.cancel()
	defer o.abandon.Stop()
	found, more, err := find(ctx, func(found any) {
		o.mu.Lock()
		defer o.mu.Unlock()
		o.state.found = found
	})
	o.mu.Lock()
	defer o.mu.Unlock()
	o.state.found, o.state.more, o.state.err, o.state.Ended = found, more, err, time.Now()
}

func (o *read) snapshot() results {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.state
}

// stop ends all reads, forgets their results, and waits for a short time: a read of RabbitMQ returns the dead letters that it
// holds.
func (r *reads) stop() {
	r.mu.Lock()
	var ended []*read
	for _, one := range r.all {
		one.cancel()
		ended = append(ended, one)
	}
	clear(r.all)
	r.mu.Unlock()
	late := time.After(stopPatience)
	for _, one := range ended {
		select {
		case <-one.done:
		case <-late:
			return
		}
	}
}

// close is stop, and rejects further reads.
func (r *reads) close() {
	r.mu.Lock()
	r.closed = true
	r.mu.Unlock()
	r.stop()
}
