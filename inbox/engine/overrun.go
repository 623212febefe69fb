package engine

import (
	"log/slog"
	"time"
)

// stuckGrace is how long a handler may take to notice that its context was cancelled.
const stuckGrace = 5 * time.Second

// overruns knows the jobs that run, and finds those whose handlers ignore the end of their time.
type overruns struct {
	cfg     *settings
	signals *signals
	limits  *limits   // has the jobs that run
	pause   *pause    // waits for no probe that is stuck
	next    time.Time // when to look; zero: nothing runs
	stuck   int
}

func (o *overruns) begin(j *job) {
	j.limit = j.began.Add(o.cfg.limit(len(j.items)) + stuckGrace)
	if j.tracked {
		j.limit = j.limit.Add(2 * o.cfg.Timeout)
	}
	o.next = earlier(o.next, j.limit)
}

func (o *overruns) end(j *job) {
	if j.stuck {
		o.stuck--
	}
}

// check reports jobs that are stuck.
func (o *overruns) check(now time.Time) {
	if o.next.IsZero() || now.Before(o.next) {
		return
	}
	o.next = time.Time{}
	for _, j := range o.limits.jobs {
		switch {
		case j.stuck:
		case now.Before(j.limit):
			o.next = earlier(o.next, j.limit)
		default:
			j.stuck = true
			o.stuck++
			o.signals.stuck()
			for _, it := range j.items {
				o.pause.probed(it, false, false)
			}
			o.cfg.Logger.Error("handler is stuck", slog.Any("message_id", j.msgs[0].ID), slog.String("name", j.msgs[0].Name),
				slog.Int("messages", len(j.msgs)), slog.Duration("for", j.limit.Sub(j.began)))
		}
	}
}
