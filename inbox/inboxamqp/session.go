package inboxamqp

import (
	"cmp"
	"errors"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
)

// Why a session stops consuming, besides the end of its channel.
var (
	errPause   = errors.New("a server that processing needs is unavailable")
	errCrowded = errors.New("failed messages that wait hold half of the prefetch")
	errStop    = errors.New("stop")
)

// session is one connection and channel. It consumes in epochs: one ends with a pause, or when too
// many failed messages wait.
type session struct {
	cfg      *settings
	run      *run
	ch       *channel
	evidence *evidence
	epoch    int64
	received bool // anything at all
}

func newSession(r *run, ch *channel) *session {
	return &session{cfg: r.cfg, run: r, ch: ch, evidence: newEvidence(r.cfg.Prefetch, r.mover, r.workers)}
}

// consume hands deliveries to the workers until told to stop or to pause. It has then
// cancelled the consumer and given back what is not begun.
func (s *session) consume() error {
	if s.run.life.stop.Err() != nil {
		return errStop
	}
	s.epoch++
	s.evidence.begin(s.epoch)
	deliveries, err := s.ch.subscribe(s.cfg.queue, s.cfg.Name, s.cfg.Prefetch)
	if err != nil {
		return err
	}
	s.run.setReady(nil)
	left, why := s.dispatch(deliveries)
	if errors.Is(why, errStop) || errors.Is(why, errCrowded) || errors.Is(why, errPause) {
		return cmp.Or(s.leave(deliveries, left), why)
	}
	for _, d := range left {
		d.leaveIt()
	}
	return why
}

// dispatch returns the deliveries no worker has taken yet, and why it ended. They gather
// while all workers are busy: what they can take together is a batch.
func (s *session) dispatch(deliveries <-chan amqp.Delivery) (left []*delivery, why error) {
	var overdue <-chan time.Time
	for {
		in, jobs := deliveries, s.run.workers.jobs
		if len(left) == 0 {
			jobs = nil
		}
		if len(left) >= min(s.cfg.Batch, s.run.quota.left()) {
			in = nil
		}
		select {
		case raw, open := <-in:
			if !open {
				return left, s.ch.cause()
			}
			left = append(left, s.accept(raw))
		case jobs <- left:
			s.run.quota.count(left)
			left = nil
		case <-s.run.life.stop.Done():
			return left, errStop
		case request := <-s.evidence.pauses:
			if request.epoch == s.epoch || s.evidence.trial.waited() > 0 { // whose own request may have found no room
				return left, request.why
			}
		case <-s.evidence.doubts:
			if overdue == nil {
				overdue = time.After(controlPatience)
			}
		case <-overdue:
			overdue = nil
			if s.evidence.judge() {
				return left, errPause
			}
			if waited := s.evidence.trial.waited(); waited > 0 { // the one that it began with has been judged
				overdue = time.After(max(controlPatience-waited, 0))
			}
		case _, open := <-s.ch.cancels:
			if !open {
				return left, s.ch.cause()
			}
			return left, errCancelled
		case err := <-s.ch.closes:
			return left, closed(err)
		case <-s.ch.conn.Done():
			return left, s.ch.conn.Err()
		}
	}
}

// accept makes a delivery of what arrived.
func (s *session) accept(raw amqp.Delivery) *delivery {
	s.received = true
	s.ch.took(raw)
	s.run.silence.received(len(raw.Body))
	return &delivery{
		raw: raw, msg: receive(raw, s.cfg), wait: waitHeader(raw, s.cfg.Retry.MaxAge),
		ch: s.ch, evidence: s.evidence, epoch: s.epoch,
	}
}

// leave cancels the consumer and then gives back what was delivered and not begun, left
// first: before, the broker would hand it out here once more.
func (s *session) leave(deliveries <-chan amqp.Delivery, left []*delivery) error {
	if err := s.ch.unsubscribe(); err != nil {
		return err
	}
	for _, d := range left {
		d.giveBack()
	}
	for raw := range deliveries {
		s.accept(raw).giveBack()
	}
	return nil
}
