package txretry

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
)

// copyLooks is how often a COPY is looked at within the time that the server has.
const copyLooks = 4

// copyWatch ends a COPY during which the server takes no more rows and does not answer. The time
// that the caller's source needs is its own.
type copyWatch struct {
	pgx.CopyFromSource
	g *guard

	steps atomic.Int64 // taken by the source; odd while it is at work
	mu    sync.Mutex
	timer *time.Timer
	seen  int64 // steps at the last look
	quiet int   // looks since a step
	done  bool
}

func watchCopy(g *guard, src pgx.CopyFromSource) *copyWatch {
	w := &copyWatch{CopyFromSource: src, g: g}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.timer = time.AfterFunc(g.patience/copyLooks, w.look)
	return w
}

func (w *copyWatch) Next() bool {
	w.steps.Add(1)
	defer w.steps.Add(1)
	return w.CopyFromSource.Next()
}

func (w *copyWatch) Values() ([]any, error) {
	w.steps.Add(1)
	defer w.steps.Add(1)
	return w.CopyFromSource.Values()
}

func (w *copyWatch) look() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.done {
		return
	}
	steps := w.steps.Load()
	if steps != w.seen || steps%2 == 1 {
		w.seen, w.quiet = steps, 0
	} else {
		w.quiet++
	}
	if w.quiet < copyLooks {
		w.timer.Reset(w.g.patience / copyLooks)
		return
	}
	w.g.until = time.Now()
	_ = w.g.conn.PgConn().Conn().SetDeadline(w.g.until)
}

func (w *copyWatch) stop() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.done = true
	w.timer.Stop()
}
