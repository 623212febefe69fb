// Package history records the figures of a service: the counts of its relays and consumers, the depths of its outboxes and
// queues, and the messages in work in each process. The page shows them, and knows since when a problem exists.
//
//	service.History, err = operator.NewPostgresHistory(pool)
//	recorder, err := history.New(service)
//	group.Add(recorder) // or call its Run beside the relay and the consumers
//
// Each process with a relay or a consumer records. Their counts add up.
package history

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"runtime/debug"
	"strings"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/internal/runloop"
	"github.com/holdfast-go/holdfast/modules/operator"
	"github.com/holdfast-go/holdfast/modules/operator/internal/core"
)

// Recorder writes the figures of this process to the history of a service.
type Recorder struct {
	o       *core.Operator
	self    operator.Process
	counted map[string]operator.Figures // the counts that are in the history or in unsure
	unsure  []operator.Figures          // of the last report, if nobody knows whether it was stored
	failing bool
}

// New returns the recorder of a service. The error names every violation in service. Its History is required.
func New(service operator.Config) (*Recorder, error) {
	if service.History == nil {
		return nil, errors.New("operator: Config.History is nil")
	}
	o, err := core.New(service)
	if err != nil {
		return nil, err
	}
	self := operator.Process{ID: uuid.New(), PID: os.Getpid(), Version: version()}
	self.Host, _ = os.Hostname() // without one, the process id must do
	return &Recorder{o: o, self: self, counted: map[string]operator.Figures{}}, nil
}

// version returns the version of this program: of its module, and the commit if that is not part of it.
func version() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return ""
	}
	commit := ""
	for _, s := range info.Settings {
		if s.Key == "vcs.revision" {
			commit = s.Value[:min(len(s.Value), shortCommit)]
		}
	}
	if commit == "" || strings.Contains(info.Main.Version, commit) {
		return info.Main.Version
	}
	return info.Main.Version + " " + commit
}

// shortCommit is the length of a commit in a version, as in pseudo-versions.
const shortCommit = 12

// lastTimeout bounds the last report, after the end of Run's context.
const lastTimeout = 2 * time.Second

// Run reports every 10 s until ctx ends, and once more then. One process of a service measures the servers in each step. A
// history that does not answer is logged once, and its counts are written later. Run always returns nil. It must not run twice at
// the same time.
func (r *Recorder) Run(ctx context.Context) error {
	r.self.Since = time.Now()
	for {
		r.log(ctx, r.record(ctx, true))
		if runloop.Sleep(ctx, core.HourStep) != nil {
			break
		}
	}
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), lastTimeout)
	defer cancel()
	err := r.record(last, false)
	if err == nil {
		err = r.o.Config.History.Leave(last, r.self.ID)
	}
	r.log(last, err)
	return nil
}

// log logs the first of several failures.
func (r *Recorder) log(ctx context.Context, err error) {
	if err != nil && !r.failing && ctx.Err() == nil {
		slog.WarnContext(ctx, "operator: history not written", slog.Any("error", err))
	}
	r.failing = err != nil
}

// record adds the counts since the last report. If measuring, it also measures unless another process has tried it in this step.
func (r *Recorder) record(ctx context.Context, measuring bool) error {
	if r.unsure != nil { // the same report again: if it was stored, this one is ignored
		if _, err := r.send(ctx); err != nil {
			return err
		}
	}
	now := r.o.Tally(ctx, &r.self)
	for _, f := range now {
		old := r.counted[f.Part]
		r.counted[f.Part] = f
		f.Done, f.Failed, f.Retried = f.Done-old.Done, f.Failed-old.Failed, f.Retried-old.Retried
		r.unsure = append(r.unsure, f)
	}
	r.self.Beat++
	asked, err := r.send(ctx)
	if err != nil || asked || !measuring {
		return err
	}
	return r.measure(ctx)
}

// send sends the report that may not be stored.
func (r *Recorder) send(ctx context.Context) (asked bool, err error) {
	asked, err = r.o.Config.History.Add(ctx, r.self, r.unsure)
	if err == nil {
		r.unsure = nil
	}
	return asked, err
}

// measure asks the servers, and writes the answers unless ctx has ended meanwhile: then errors are no problems.
func (r *Recorder) measure(ctx context.Context) error {
	found := r.o.Measure(ctx)
	if ctx.Err() != nil {
		return nil
	}
	r.self.Beat++
	_, err := r.o.Config.History.Add(ctx, r.self, found)
	return err
}
