package page

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/holdfast-go/holdfast/modules/operator/internal/core"
)

const (
	// maxRunning is how many changes that the page began may run at a time.
	maxRunning = 4
	// jobsKept is how many that have ended are still shown.
	jobsKept = 100
)

// errBusy is returned where maxRunning changes run.
var errBusy = errors.New("four changes are running: wait until one has ended")

// errEnding is returned while the page is closed.
var errEnding = errors.New("the process ends: nothing is begun any more")

// jobs are the changes that a page has begun in this process.
type jobs struct {
	mu      sync.Mutex
	last    int
	all     []*job    // the newest last
	ending  time.Time // until when it is waited for those that run; zero: more may begin
	running sync.WaitGroup
}

// job is a change, and how far it is.
type job struct {
	cancel context.CancelFunc

	mu    sync.Mutex
	state jobState
}

// jobState is what is shown of a job.
type jobState struct {
	ID           int
	What         string
	Edited       bool // with other bodies
	By, Reason   string
	Began, Ended time.Time
	// Stopped is who has asked for its end; empty while it goes on.
	Stopped string
	// Total is how many it is about, as the preview counted them.
	Total int
	Parts []jobPart
}

// jobPart is what a job does in one place.
type jobPart struct {
	From, Chosen string
	Done         int
	Result       *core.Changed // nil: it has not ended
	Error        string
}

// Running says that the job has not ended.
func (s jobState) Running() bool { return s.Ended.IsZero() }

// Done is how many dead letters it has come to.
func (s jobState) Done() int {
	done := 0
	for _, part := range s.Parts {
		done += part.Done
	}
	return min(done, s.Total)
}

// begin runs a job in the background, unless too many run. Its context ends with the page.
func (j *jobs) begin(state jobState, run func(context.Context, *job)) (int, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if !j.ending.IsZero() {
		return 0, errEnding
	}
	running := 0
	for _, other := range j.all {
		if other.snapshot().Running() {
			running++
		}
	}
	if running >= maxRunning {
		return 0, errBusy
	}
	if len(j.all) >= jobsKept {
		oldest := slices.IndexFunc(j.all, func(other *job) bool { return !other.snapshot().Running() })
		j.all = slices.Concat(j.all[:oldest], j.all[oldest+1:]) // few run
	}
	j.last++
	state.ID, state.Began = j.last, time.Now()
	ctx, cancel := context.WithCancel(context.Background())
	started := &job{cancel: cancel, state: state}
	j.all = append(j.all, started)
	j.running.Go(func() {
		defer cancel()
		run(ctx, started)
		started.update(func(s *jobState) { s.Ended = time.Now() })
	})
	return state.ID, nil
}

// end has no more begin, cancels those that run, and waits until they have ended, or so much time has passed since it was
// called first.
func (j *jobs) end(within time.Duration) {
	j.mu.Lock()
	if j.ending.IsZero() {
		j.ending = time.Now().Add(within)
	}
	left := time.Until(j.ending)
	for _, one := range j.all {
		one.cancel()
	}
	j.mu.Unlock()
	ended := make(chan struct{})
	go func() {
		j.running.Wait()
		close(ended)
	}()
	select {
	case <-ended:
	case <-time.After(left):
	}
}

// stop ends a job after what it is at.
func (j *job) stop(by string) {
	j.update(func(s *jobState) {
		if s.Running() && s.Stopped == "" {
			s.Stopped = by
		}
	})
	j.cancel()
}

// find returns a job that is still known, or nil.
func (j *jobs) find(id int) *job {
	j.mu.Lock()
	defer j.mu.Unlock()
	for _, one := range j.all {
		if one.snapshot().ID == id {
			return one
		}
	}
	return nil
}

// list returns the newest first.
func (j *jobs) list() []jobState {
	j.mu.Lock()
	defer j.mu.Unlock()
	var all []jobState
	for i := len(j.all) - 1; i >= 0; i-- {
		all = append(all, j.all[i].snapshot())
	}
	return all
}

func (j *job) update(change func(*jobState)) {
	j.mu.Lock()
	defer j.mu.Unlock()
	change(&j.state)
}

// snapshot is a copy: the parts change while it is shown.
func (j *job) snapshot() jobState {
	j.mu.Lock()
	defer j.mu.Unlock()
	s := j.state
	s.Parts = append([]jobPart(nil), s.Parts...)
	return s
}
