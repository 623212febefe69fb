package group

import (
	"context"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/internal/runloop"
	"github.com/holdfast-go/holdfast/internal/telemetry"
)

// Counted is the source of one partition, which counts only its own messages and dead letters.
type Counted interface {
	Source
	driver.Measured
	driver.Keeper
}

// Whole adds up the counts of all partitions.
type Whole[S Counted] struct {
	driver.Source // the first partition's; never opened
	parts         []S
}

// NewWhole returns the sum of at least one partition.
func NewWhole[S Counted](parts []S) *Whole[S] { return &Whole[S]{parts[0], parts} }

// Backlog implements driver.Measured.
func (w *Whole[S]) Backlog(ctx context.Context) (sum driver.Backlog, err error) {
	for _, part := range w.parts {
		b, err := part.Backlog(ctx)
		if err != nil {
			return sum, err
		}
		sum.Waiting, sum.Retrying, sum.PutOff = sum.Waiting+b.Waiting, sum.Retrying+b.Retrying, sum.PutOff+b.PutOff
	}
	return sum, nil
}

// DeadLetters implements driver.Keeper.
func (w *Whole[S]) DeadLetters() driver.DeadLetters {
	var all []driver.DeadLetters
	for _, part := range w.parts {
		all = append(all, part.DeadLetters())
	}
	return driver.JoinDeadLetters(all...)
}

// leaveTimeout bounds the last call of a process that is shutting down.
const leaveTimeout = time.Second

// Records is Members on a broker that only keeps records: each process writes one again and again, and counts all.
type Records struct {
	// Every is the interval. The broker forgets a record that was not written for several.
	Every time.Duration
	// Note writes the record of this process and returns the number of records.
	Note func(ctx context.Context) (int, error)
	// Leave removes the record. If it fails, the process counts until the broker forgets it.
	Leave func(ctx context.Context) error
	Log   *slog.Logger

	count atomic.Int64
}

// Run implements Members.
func (r *Records) Run(ctx context.Context) {
	var seldom telemetry.Seldom
	for ctx.Err() == nil {
		n, err := r.Note(ctx)
		if err == nil {
			r.count.Store(int64(n))
		} else if repeats, due := seldom.Due(); due && ctx.Err() == nil {
			r.Log.WarnContext(ctx, "inbox: processes not counted", slog.Any("error", err), slog.Int("repeats", repeats))
		}
		_ = runloop.Sleep(ctx, r.Every)
	}
	r.count.Store(0)
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), leaveTimeout)
	defer cancel()
	_ = r.Leave(ctx)
}

// Count implements Members.
func (r *Records) Count(context.Context) int { return int(r.count.Load()) }
