package engine

import (
	"slices"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/internal/isolate"
)

const (
	// outage is how many messages fail for want of a server before the consumer pauses at once.
	outage = 16

	// controlPatience is how long one waits for another message to begin, before it is tried again. A
	// broker that is busy may be silent for a second. controlLimit is for one that has begun to go
	// through, which may take its time.
	controlPatience = 1500 * time.Millisecond
	controlLimit    = 5 * time.Second

	// suspectPause is how long a suspect stays away while others go through, spread by half.
	suspectPause = 2 * time.Second

	// maxSuspects bounds what is remembered of messages that other consumers have finished.
	maxSuspects = 4096

	// maxTrial bounds how many messages are kept from being the next probe.
	maxTrial = 256
)

// trial keeps the messages that could not be processed, for want of a server as it seems, until
// others tell whose failure it was. It has no clock.
type trial struct {
	cfg    *settings
	search *isolate.Search[uuid.UUID]
	held   []*item
}

func newTrial(cfg *settings) *trial {
	search := isolate.New[uuid.UUID](isolate.Singles)
	search.Strikes, search.Control, search.Most = 2, true, maxSuspects
	return &trial{cfg: cfg, search: search}
}

// suspect notes messages that failed together for want of a server. Each must fail alone.
func (t *trial) suspect(items []*item) {
	if len(items) == 1 { // the others of its batch went through
		t.search.Add(items[0].m.ID)
		return
	}
	ids := make([]uuid.UUID, len(items))
	for i, it := range items {
		ids[i] = it.m.ID
	}
	t.search.Failed(ids...)
}

// failed takes a message that could not be processed for want of a server. It returns one that has
// to make room, or nil.
func (t *trial) failed(it *item, now time.Time) (oldest *item) {
	t.search.Failed(it.m.ID)
	return t.keep(it, now)
}

// keep holds a message until the trial ends. It returns one that has to make room, or nil.
func (t *trial) keep(it *item, now time.Time) (oldest *item) {
	it.since = now
	t.held = append(t.held, it)
	if !t.cfg.Ordered && len(t.held) > maxTrial {
		oldest, t.held = t.held[0], t.held[1:]
	}
	return oldest
}

func (t *trial) has(it *item) bool { return t.search.Has(it.m.ID) }

// struck reports whether a message has failed so before, while others went through.
func (t *trial) struck(it *item) bool { return t.search.Struck(it.m.ID) }

// passed notes a message that went through: the servers are there. So those that have failed before
// it began have failed by themselves: twice and they are guilty, else they stay away for a moment.
func (t *trial) passed(it *item) (guilty, spared []*item) {
	t.search.Clear(it.m.ID)
	if len(t.held) == 0 {
		return nil, nil
	}
	guiltyIDs, sparedIDs := t.search.Controlled(it.began)
	among := func(ids []uuid.UUID) []*item {
		if len(ids) == 0 {
			return nil
		}
		return t.take(func(it *item) bool { return slices.Contains(ids, it.m.ID) })
	}
	return among(guiltyIDs), among(sparedIDs)
}

// take removes messages from the trial.
func (t *trial) take(which func(*item) bool) (taken []*item) {
	t.held = slices.DeleteFunc(t.held, func(it *item) bool {
		if which(it) {
			taken = append(taken, it)
			return true
		}
		return false
	})
	return taken
}

// judge looks at what fails while no pause is on. Newest is when the last of the messages that run
// began. It reports whether that is an outage; or whether that is in doubt, since nothing has begun
// for a while: the broker may be silent. Else it returns messages that have failed so before, and
// are not blamed as long as none goes through.
func (t *trial) judge(now, newest time.Time) (isOutage, inDoubt bool, spared []*item) {
	fresh := 0
	for _, it := range t.held {
		if t.struck(it) {
			continue
		}
		fresh++
		switch {
		case now.Before(patienceWith(it, newest)):
		case newest.Before(it.since):
			inDoubt = true
		default:
			isOutage = true
		}
	}
	isOutage = isOutage || fresh >= min(outage, t.cfg.Prefetch)
	if isOutage || inDoubt {
		return isOutage, inDoubt, nil
	}
	spared = t.take(func(it *item) bool { return t.struck(it) && !now.Before(patienceWith(it, newest)) })
	return false, false, spared
}

// patienceWith returns until when a message waits for others to tell.
func patienceWith(it *item, newest time.Time) time.Time {
	if !newest.Before(it.since) { // what begins in the same moment begins after it
		return it.since.Add(controlLimit)
	}
	return it.since.Add(controlPatience)
}

// release ends the trial, blaming none, and returns its messages.
func (t *trial) release() (all []*item) {
	t.search.Outage()
	all, t.held = t.held, nil
	return all
}

// wake returns when judge has something to say; zero: not before something happens.
func (t *trial) wake(newest time.Time) (at time.Time) {
	for _, it := range t.held {
		at = earlier(at, patienceWith(it, newest))
	}
	return at
}

// clear forgets a message that failed otherwise.
func (t *trial) clear(it *item) { t.search.Clear(it.m.ID) }

// begin notes when the messages of a job begin.
func (t *trial) begin(j *job) {
	for _, it := range j.items {
		it.began = t.search.Mark()
	}
}
