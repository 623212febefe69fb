package core

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/modules/operator"
)

// goneAfter is the time without a report after which a process counts as gone: two reports are missing.
const goneAfter = 30 * time.Second

// slowest is the number of messages in work that are shown.
const slowest = 10

// Running are the processes of a service and their messages in work. Its JSON is the output of running --json.
type Running struct {
	At        time.Time `json:"at"`
	Processes []Process `json:"processes"`
	// InWork is the number of messages in work in all processes that report. Slowest are the oldest ten of them.
	InWork  int              `json:"in_work"`
	Slowest []RunningMessage `json:"slowest"`
}

// Process is a process as it last reported itself.
type Process struct {
	ID      uuid.UUID `json:"id"`
	Host    string    `json:"host"`
	PID     int       `json:"pid"`
	Version string    `json:"version,omitempty"`
	Roles   []string  `json:"roles"`
	Since   time.Time `json:"since"`
	Seen    time.Time `json:"seen"`
	// Gone is true if it has not reported for 30 s.
	Gone   bool `json:"gone,omitempty"`
	InWork int  `json:"in_work"`
	// Oldest is the begin of its oldest message; zero: none.
	Oldest time.Time `json:"oldest,omitzero"`
}

// RunningMessage is a message in work.
type RunningMessage struct {
	Consumer string    `json:"consumer"`
	ID       uuid.UUID `json:"id"`
	Name     string    `json:"name"`
	Key      string    `json:"key,omitempty"`
	Attempt  int       `json:"attempt"`
	Since    time.Time `json:"since"`
	// Until is when the context of its handler ends. Late is true if the handler has not returned by then.
	Until   time.Time `json:"until"`
	Late    bool      `json:"late,omitempty"`
	Process string    `json:"process"`
}

// Versions returns the versions of the processes that report.
func (r Running) Versions() []string {
	var all []string
	for _, p := range r.Processes {
		if !p.Gone && p.Version != "" {
			all = append(all, p.Version)
		}
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// Live returns the number of processes that report.
func (r Running) Live() (n int) {
	for _, p := range r.Processes {
		if !p.Gone {
			n++
		}
	}
	return n
}

// Running returns the processes of the service, which report every 10 s, with a Mistake if the service keeps no history.
func (o *Operator) Running(ctx context.Context) (Running, error) {
	if o.Config.History == nil {
		return Running{}, Mistakef("the processes are unknown: the service keeps no history")
	}
	got := o.processes.within(LiveEvery, func() (got reported) {
		got.at = time.Now()
		got.all, got.err = o.Config.History.Processes(context.WithoutCancel(ctx)) // others wait for it, too
		return got
	})
	return runningOf(got.all, got.at), got.err
}

// reported are the processes at a time.
type reported struct {
	all []operator.Process
	at  time.Time
	err error
}

func runningOf(all []operator.Process, at time.Time) Running {
	r := Running{At: at, Processes: []Process{}, Slowest: []RunningMessage{}} // not null in JSON
	for _, p := range all {
		one := Process{
			ID: p.ID, Host: p.Host, PID: p.PID, Version: p.Version, Roles: append([]string{}, p.Roles...), Since: p.Since, Seen: p.Seen,
			Gone: at.Sub(p.Seen) > goneAfter, InWork: p.InWork,
		}
		if len(p.Slowest) > 0 {
			one.Oldest = p.Slowest[0].Since
		}
		r.Processes = append(r.Processes, one)
		if one.Gone {
			continue
		}
		r.InWork += p.InWork
		for _, m := range p.Slowest {
			r.Slowest = append(r.Slowest, RunningMessage{
				Consumer: m.Consumer, ID: m.ID, Name: m.Name, Key: m.Key, Attempt: m.Attempt, Since: m.Since, Until: m.Until,
				Late: p.Seen.After(m.Until), Process: one.Name(),
			})
		}
	}
	slices.SortStableFunc(r.Slowest, func(a, b RunningMessage) int { return a.Since.Compare(b.Since) })
	r.Slowest = r.Slowest[:min(len(r.Slowest), slowest)]
	return r
}

// Name is the host and the process id.
func (p Process) Name() string { return fmt.Sprintf("%s/%d", p.Host, p.PID) }

// KeepsNone reports whether an error of Running means that the service keeps no history.
func KeepsNone(err error) bool {
	_, mistake := errors.AsType[*Mistake](err)
	return mistake
}

// reading is the last answer to a question that costs something. All who ask share it.
type reading[T any] struct {
	mu   sync.Mutex
	last T
	at   time.Time
}

// within returns the last answer if it is younger than age, otherwise a new one.
func (r *reading[T]) within(age time.Duration, read func() T) T {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.at.IsZero() || time.Since(r.at) >= age {
		r.last = read()
		r.at = time.Now()
	}
	return r.last
}
