// Package history records the figures of a service: the counts of its relays and consumers, and the depths of its outboxes and
// queues. The page shows them as charts, and knows since when a problem exists.
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
	"time"

	"github.com/holdfast-go/holdfast/internal/runloop"
	"github.com/holdfast-go/holdfast/modules/operator"
	"github.com/holdfast-go/holdfast/modules/operator/internal/core"
)

// Recorder writes the figures of this process to the history of a service.
type Recorder struct {
	o       *core.Operator
	written map[string]operator.Figures // the counts that are in the history
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
	return &Recorder{o: o, written: map[string]operator.Figures{}}, nil
}

// lastTimeout bounds the last record, after the end of Run's context.
const lastTimeout = 2 * time.Second

// Run records every 10 s until ctx ends, and once more then. One process of a service measures the servers in each step. A
// history that does not answer is logged once, and its counts are written later. Run always returns nil. It must not run twice at
// the same time.
func (r *Recorder) Run(ctx context.Context) error {
	for {
		r.record(ctx, true)
		if runloop.Sleep(ctx, core.HourStep) != nil {
			break
		}
	}
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), lastTimeout)
	defer cancel()
	r.record(last, false)
	return nil
}

// record adds the counts since the last record. If measuring, it also measures unless another process has.
func (r *Recorder) record(ctx context.Context, measuring bool) {
	now := r.o.Tally(ctx)
	more := make([]operator.Figures, len(now))
	for i, f := range now {
		old := r.written[f.Part]
		more[i] = f
		more[i].Done, more[i].Failed, more[i].Retried = f.Done-old.Done, f.Failed-old.Failed, f.Retried-old.Retried
	}
	measured, err := r.o.Config.History.Add(ctx, more)
	if err == nil {
		for _, f := range now {
			r.written[f.Part] = f
		}
		if measuring && !measured {
			err = r.measure(ctx)
		}
	}
	if err != nil && !r.failing && ctx.Err() == nil {
		slog.WarnContext(ctx, "operator: history not written", slog.Any("error", err))
	}
	r.failing = err != nil
}

// measure asks the servers, and writes the answers unless ctx has ended meanwhile: then errors are no problems.
func (r *Recorder) measure(ctx context.Context) error {
	found := r.o.Measure(ctx)
	if ctx.Err() != nil {
		return nil
	}
	_, err := r.o.Config.History.Add(ctx, found)
	return err
}
