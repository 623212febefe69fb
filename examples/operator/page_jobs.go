package operator

import (
	"errors"
	"sync"
	"time"
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
	// Total is how many it is about, as the preview counted them.
	Total int
	Parts []jobPart
}

// jobPart is what a job does in one place.
type jobPart struct {
	From, Chosen string
	Done         int
	Result       *changed // nil: it has not ended
	Error        string
}

// Running says that the job has not ended.
func (s jobState) Running() bool { return s.Ended.IsZero() }

// Done is how many letters it has come to.
func (s jobState) Done() int {
	done := 0
	for _, part := range s.Parts {
		done += part.Done
	}
	return min(done, s.Total)
}

// begin runs a job in the background, unless too many run.
func (j *jobs) begin(state jobState, run func(*job)) (int, error) {
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
		j.all = append(j.all[:0:0], j.all[1:]...) // what still runs is among the newest, and is not lost but to the page
	}
	j.last++
	state.ID, state.Began = j.last, time.Now()
	started := &job{state: state}
	j.all = append(j.all, started)
	j.running.Go(func() {
		run(started)
		started.update(func(s *jobState) { s.Ended = time.Now() })
	})
	return state.ID, nil
}

// end has no more begin, and waits until those that run have ended, or so much time has passed since it was called first.
func (j *jobs) end(within time.Duration) {
	j.mu.Lock()
	if j.ending.IsZero() {
		j.ending = time.Now().Add(within)
	}
	left := time.Until(j.ending)
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
