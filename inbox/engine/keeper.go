package engine

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/internal/telemetry"
)

// parkedPoll is how often all parked keys are looked at: so late does one go on after a replay.
const parkedPoll = 2 * time.Second

// keeper reads parked keys for the loop.
type keeper struct {
	cfg    *settings
	post   func(event)
	wake   chan struct{} // one place
	seldom telemetry.Seldom

	mu      sync.Mutex
	session *session // nil: there is nothing to read for
	asked   []question
}

// question asks for the first message of a key.
type question struct {
	name   string
	stored int // of the key, when it was asked
}

// answer is the answer to a question.
type answer struct {
	question
	message *inbox.Message // nil: none, or a dead letter
	there   bool
	err     error
}

func newKeeper(cfg *settings, post func(event)) *keeper {
	return &keeper{cfg: cfg, post: post, wake: make(chan struct{}, 1)}
}

// serve has the keeper read for a session, or for none.
func (k *keeper) serve(s *session) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.session, k.asked = s, nil
}

// ask puts a question. It never blocks.
func (k *keeper) ask(q question) {
	k.mu.Lock()
	k.asked = append(k.asked, q)
	k.mu.Unlock()
	select {
	case k.wake <- struct{}{}:
	default:
	}
}

// run answers questions, and looks at all keys now and then, until ctx ends.
func (k *keeper) run(ctx context.Context) {
	ticker := time.NewTicker(parkedPoll)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-k.wake:
			k.answer(ctx)
		case <-ticker.C:
			k.look(ctx)
		}
	}
}

func (k *keeper) answer(ctx context.Context) {
	k.mu.Lock()
	s, asked := k.session, k.asked
	k.asked = nil
	k.mu.Unlock()
	for _, q := range asked {
		if s == nil || s.over.Load() || ctx.Err() != nil {
			return
		}
		a := answer{question: q}
		a.message, a.there, a.err = k.cfg.parking.First(ctx, q.name)
		k.complain(a.err)
		if a.message != nil {
			a.message.Redelivered = true // it may have run before, and ended the process
		}
		k.post(event{kind: answered, session: s, answer: a})
	}
}

func (k *keeper) look(ctx context.Context) {
	k.mu.Lock()
	s := k.session
	k.mu.Unlock()
	if s == nil || s.over.Load() {
		return
	}
	heads, err := parkedHeads(ctx, k.cfg.parking)
	k.complain(err)
	if err == nil {
		k.post(event{kind: looked, session: s, heads: heads})
	}
}

func (k *keeper) complain(err error) {
	if err == nil {
		return
	}
	if repeats, ok := k.seldom.Due(); ok {
		k.cfg.Logger.Warn("parked keys not read", slog.Any("error", err), slog.Int("repeats", repeats))
	}
}

// park stores a message of a parked key, or the dead letter that stops it.
func park(ctx context.Context, p driver.Parking, it *item, consumer string) error {
	if it.order.target == toPark {
		return p.Append(ctx, it.key, it.m)
	}
	key := it.stored
	if key == "" {
		key = it.key
	}
	return p.Stop(ctx, key, driver.NewDeadLetter(it.m, it.fate.failure, consumer, it.fate.at))
}
