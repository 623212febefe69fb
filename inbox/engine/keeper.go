package engine

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/internal/ids"
	"github.com/holdfast-go/holdfast/internal/telemetry"
)

// parkedPoll is how often all parked keys are looked at: so late does one go on after a replay.
const parkedPoll = 2 * time.Second

// parkedCount is how often what waits is counted. In between, what is stored is added.
const parkedCount = 10 * time.Second

// keeper reads parked keys for the loop.
type keeper struct {
	cfg     *settings
	signals *signals
	post    func(event)
	wake    chan struct{} // one place
	seldom  telemetry.Seldom
	owner   uuid.UUID // of what it claims

	renewals chan []uuid.UUID // one place
	counted  time.Time        // run's own: when what waits was counted

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
	message *inbox.Message // nil: none, or it is not for this process
	until   time.Time      // it is claimed
	there   bool
	err     error
}

func newKeeper(cfg *settings, signals *signals, post func(event)) *keeper {
	return &keeper{cfg: cfg, signals: signals, post: post, owner: ids.New(), wake: make(chan struct{}, 1), renewals: make(chan []uuid.UUID, 1)}
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
		a.until = claimedUntil(time.Now())
		a.message, a.there, a.err = k.cfg.parking.Claim(ctx, q.name, k.lease(claimTime))
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
		k.complain(k.count(ctx, len(heads)))
	}
}

// count counts what waits, at times, but nothing where no key does.
func (k *keeper) count(ctx context.Context, keys int) (err error) {
	n := 0
	if keys > 0 {
		if time.Since(k.counted) < parkedCount {
			return nil
		}
		if n, err = k.cfg.parking.Count(ctx, k.cfg.MaxParked); err != nil {
			return err
		}
		k.counted = time.Now()
	}
	k.signals.waits.Store(int64(n))
	return nil
}

// renew renews claims until ctx ends.
func (k *keeper) renew(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case messages := <-k.renewals:
			r := renewal{messages: messages, sent: time.Now()}
			bounded, cancel := context.WithTimeout(ctx, claimPatience)
			r.kept, r.err = k.cfg.parking.Renew(bounded, k.lease(claimTime), messages)
			cancel()
			k.complain(r.err)
			k.post(event{kind: renewed, renewal: r})
		}
	}
}

// giveUp ends claims, so that another process need not wait.
func (k *keeper) giveUp(ctx context.Context, messages []uuid.UUID) {
	if len(messages) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, k.cfg.Timeout)
	defer cancel()
	_, err := k.cfg.parking.Renew(ctx, k.lease(0), messages)
	k.complain(err)
}

func (k *keeper) lease(d time.Duration) driver.Lease { return driver.Lease{Owner: k.owner, For: d} }

func (k *keeper) complain(err error) {
	if err == nil {
		return
	}
	if repeats, ok := k.seldom.Due(); ok {
		k.cfg.Logger.Warn("parked keys not read or claimed", slog.Any("error", err), slog.Int("repeats", repeats))
	}
}

// full returns why a message may not be stored; nil: it may.
func (k *keeper) full(it *item) error {
	switch {
	case it.order.target == toPark && k.signals.waits.Load() >= int64(k.cfg.MaxParked):
		return errParkedFull
	case it.order.target == toStop && it.parkedAs == "" && k.signals.parked.Load() >= maxParked:
		return errTooManyParked
	}
	return nil
}

// park stores a message of a parked key, or the dead letter that stops it.
func (k *keeper) park(ctx context.Context, it *item) error {
	p := k.cfg.parking
	if it.parkedAs != "" {
		return p.Fail(ctx, k.owner, it.letter(k.cfg.Name))
	}
	var err error
	if it.order.target == toPark {
		err = p.Append(ctx, it.key, it.m)
	} else {
		err = p.Stop(ctx, it.key, it.letter(k.cfg.Name))
	}
	if err == nil {
		k.signals.waits.Add(1)
	}
	return err
}
