package inboxamqp

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/holdfast-go/holdfast/internal/amqpconn"
)

// run is one call of Run: the parts that outlive a session, each with a state of its own. A message
// goes from the session (session.go) to the workers (workers.go), which call the processor
// (calls.go) and settle it by its channel (channel.go), after the mover (mover.go) has put a copy
// elsewhere if it failed. The ledger's notes are in attempts.go, the pauses in evidence.go and
// prober.go.
//
// Only the files that import the AMQP client know what a broker is. The others, from the workers to
// the ledger's notes and the limits, know a delivery as a message with four things to do with it:
// acknowledge it, give it back, or have the mover retry or bury it.
type run struct {
	cfg      *settings
	signals  *signals
	setReady func(error)

	life     *lifetime
	quota    *quota
	workers  *workers
	attempts *attempts
	mover    *mover
	silence  silence
	others   sync.WaitGroup // all goroutines besides workers and moves
}

func (c *Consumer) newRun(ctx context.Context) *run {
	cfg, life := c.cfg, newLifetime(ctx, c.cfg.ShutdownTimeout)
	copies := amqpconn.NewPublisher(amqpconn.PublisherConfig{
		Dial: c.dial, Timeout: cfg.Timeout, Logger: cfg.Logger,
		Window: max(cfg.Concurrency, cfg.Batch, 16), ConfirmTimeout: cfg.confirmTimeout,
		ShutdownTimeout: max(reserve(cfg.ShutdownTimeout)/3, time.Millisecond),
		Down:            func(error) { c.signals.lost(ctx) },
	})
	c.copies.Store(copies)
	r := &run{
		cfg: cfg, signals: c.signals, setReady: c.setReady, life: life,
		quota:    &quota{cfg: cfg, halt: life.halt},
		attempts: &attempts{cfg: cfg, life: life, turns: newTurns(cfg.Concurrency)},
		mover:    &mover{cfg: cfg, life: life, copies: &copier{copies, context.WithoutCancel(ctx)}, refusals: &c.refusals},
	}
	r.workers = &workers{
		cfg: cfg, life: life, jobs: make(chan []*delivery), attempts: r.attempts, mover: r.mover,
		calls: &calls{cfg: cfg, processor: c.processor, signals: c.signals, work: life.work, stuck: &c.stuck},
	}
	for range cfg.Concurrency {
		r.workers.running.Go(r.workers.work)
	}
	r.others.Go(func() { copies.Run(life.finished) })
	r.others.Go(life.keep)
	r.others.Go(func() { r.quota.watch(life.stop) })
	if cfg.background != nil {
		r.others.Go(func() { cfg.background.Background(life.stop) })
	}
	return r
}

// serve runs the sessions and ends the run after them. It returns ShutdownTimeout after the stop at
// the latest, whatever hangs.
func (r *run) serve(sessions func()) {
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		sessions()
		r.finish()
	}()
	select {
	case <-ended:
	case <-r.life.overdue:
		r.life.end()
		r.cfg.Logger.Error("ShutdownTimeout is over: what hangs is left behind")
	}
}

// finish waits for the workers and ends the rest.
func (r *run) finish() {
	r.life.halt()
	idle := r.workers.close()
	select {
	case <-idle:
	case <-r.life.abandoned:
		r.cfg.Logger.Error("handlers ignore the end of their context and are left behind")
		r.attempts.spare()
	}
	r.mover.aside.close()
	r.life.end()
	r.others.Wait()
}

// session receives messages on one connection until that fails, or returns nil after a drain.
func (r *run) session(_ context.Context, conn *amqpconn.Conn) error {
	defer context.AfterFunc(r.life.finished, conn.Close)() // a drain that hangs
	opened := context.AfterFunc(r.life.stop, conn.Close)   // nothing is in hand yet
	ch, err := r.silence.open(conn)
	if !opened() {
		return nil
	}
	if err != nil {
		return err
	}
	s := newSession(r, newChannel(conn, ch, r.signals))
	defer func() {
		s.ch.over.Store(true)
		r.silence.note(conn.Silent() && !s.received)
	}()
	defer r.setReady(errNoSession)
	for {
		err := s.consume()
		if errors.Is(err, errCrowded) {
			continue
		}
		if errors.Is(err, errPause) {
			r.setReady(fmt.Errorf("%w: %w", errPaused, err))
			err = (&prober{s}).pause(err)
		}
		s.evidence.trial.close()
		switch {
		case errors.Is(err, errStop):
			r.setReady(errDraining)
			s.ch.drain(r.life.abandoned)
			return nil
		case err != nil:
			return err
		}
	}
}
