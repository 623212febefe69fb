package inbox

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/holdfast-go/holdfast/internal/ids"
)

const defaultRetention = 8 * 24 * time.Hour

// ErrOutlived is in the error of a replay that left dead letters where they are because
// nobody remembers any more whether they were processed; see Replay.Force.
var ErrOutlived = errors.New("inbox: dead letters are older than what processed messages are remembered for")

// Replay says who returns dead letters to their queues, and how.
type Replay struct {
	// By and Reason are as in Removal. A DryRun needs no By.
	By, Reason string
	// DryRun counts and returns nothing. It does not see that a queue is gone.
	DryRun bool
	// PerSecond bounds how many are returned each second. 0 means no bound.
	PerSecond float64
	// Retention is how long the consumers remember what they have processed. A message may
	// have been processed after all, its acknowledgement lost on the way; when its id is
	// older than this, that would not be noticed, so it is refused. 0 means 8 days.
	Retention time.Duration
	// Force returns those, too.
	Force bool
}

// WithDefaults returns the Replay with every zero field replaced by its default.
func (r Replay) WithDefaults() Replay {
	if r.Retention == 0 {
		r.Retention = defaultRetention
	}
	return r
}

// Validate returns every violation in one error, naming the fields.
func (r Replay) Validate() error {
	var problems []error
	if !r.DryRun {
		problems = append(problems, checkActor("Replay", r.By, r.Reason))
	}
	if !(r.PerSecond >= 0) || math.IsInf(r.PerSecond, 0) {
		problems = append(problems, fmt.Errorf("inbox: Replay.PerSecond %v is not a number of at least 0", r.PerSecond))
	}
	if r.Retention < 0 {
		problems = append(problems, fmt.Errorf("inbox: Replay.Retention %v is negative", r.Retention))
	}
	return errors.Join(problems...)
}

// Refuses reports whether a dead letter is too old to be returned now. One whose own id is no
// UUID v7, since its consumer derives one, is as old as its first failure.
func (r Replay) Refuses(d DeadLetter, now time.Time) bool {
	born := d.FirstFailedAt
	if ids.Check(d.Message.ID) == nil {
		born = time.UnixMilli(int64(binary.BigEndian.Uint64(d.Message.ID[:8]) >> 16))
	}
	if r.Force || born.IsZero() {
		return false
	}
	return now.Sub(born) > r.WithDefaults().Retention
}

// Pause is the time from one returned message to the next.
func (r Replay) Pause() time.Duration {
	if r.PerSecond == 0 {
		return 0
	}
	return time.Duration(min(float64(time.Second)/r.PerSecond, math.MaxInt64/2)) // it may be next to nothing
}

// Replayed is what became of the dead letters that a replay selected.
type Replayed struct {
	// Returned are in their queues again; with DryRun, would be.
	Returned int
	// Outlived were refused for their age, and stay.
	Outlived int
	// Failed could not be put into their queue, and stay.
	Failed int
}
