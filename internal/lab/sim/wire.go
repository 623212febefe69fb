package sim

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/holdfast-go/holdfast/examples/reservation/shoptest"
	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxtest"
	"github.com/holdfast-go/holdfast/outbox/driver"
)

var (
	errDead = errors.New("sim: the process is dead")
	errFail = errors.New("sim: the connection failed")
	errAway = errors.New("sim: connection refused")
)

// Call implements shoptest.Wire.
func (w *world) Call(ctx context.Context, server, step string, do func() error) error {
	p := processOf(ctx)
	if p == nil {
		return do() // the observer's own look
	}
	do = w.history.watch(ctx, step, do)
	n := p.count(step)
	if err := p.travel(ctx, step, n); err != nil {
		return err
	}
	if step != shoptest.StepTransaction && w.isAway(server) {
		return errAway
	}
	return p.faulty(ctx, step, n, do)
}

// faulty does what a step does, and what goes wrong there.
func (p *process) faulty(ctx context.Context, step string, n uint64, do func() error) error {
	k, r := p.world.fault(p.name, step, n)
	inside := step == shoptest.StepBegin || step == shoptest.StepEnd
	switch k {
	case refused:
		if inside {
			return said([]string{"40001", "40P01", "55P03"}[r.below(3)])
		}
		return errFail
	case nacked:
		return &driver.PublishError{Class: driver.Retryable, Err: errFail}
	case hung:
		p.wait(ctx, r.between(time.Second, 9*time.Second))
		return errFail
	case killedBefore:
		p.kill()
		return errDead
	case frozenBefore:
		p.freeze(r.between(time.Second, 20*time.Second))
		if inside { // whose connection the server closes after a while
			time.Sleep(5 * time.Second)
			return said("25P03")
		}
		p.thawed()
		if err := p.check(ctx); err != nil {
			return err
		}
	}
	err := do()
	switch k {
	case twice:
		err = errors.Join(err, do())
	case lost:
		return errFail
	case killedAfter:
		p.kill()
		return errDead
	case late:
		p.wait(ctx, r.between(time.Second, 9*time.Second))
	case frozenAfter:
		p.freeze(r.between(time.Second, 20*time.Second))
	}
	if inside {
		return err
	}
	return errors.Join(err, p.travel(ctx, step, n+1<<32))
}

// said is an answer of Postgres.
func said(state string) error { return &pgconn.PgError{Severity: "ERROR", Code: state, Message: "sim"} }

// travel is the way of a request or an answer. No two take the same time, so that what comes first
// does not depend on the scheduler.
func (p *process) travel(ctx context.Context, step string, n uint64) error {
	longest := 2 * time.Millisecond
	if p.world.plan.has(slowWire) {
		longest = 100 * time.Millisecond
	}
	r := p.world.dice.rollFor(p.name, step, n)
	f := r.float()
	time.Sleep(20*time.Microsecond + time.Duration(f*f*f*float64(longest)))
	p.thawed()
	return p.check(ctx)
}

// check returns why the process does not go on with a call.
func (p *process) check(ctx context.Context) error {
	if p.dead.Load() {
		return errDead
	}
	return ctx.Err()
}

// wait waits until the time is over or nobody waits any more.
func (p *process) wait(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}

// Lease implements shoptest.Wire.
func (w *world) Lease(ctx context.Context, d time.Duration) time.Duration {
	p := processOf(ctx)
	if p == nil {
		return d
	}
	if k, _ := w.fault(p.name, stepLease, p.count(stepLease)); k == shortLease {
		return time.Nanosecond
	}
	return max(1, time.Duration(float64(d)*p.pace))
}

// consumerSteps are the names of the steps between a consumer and its queue.
var consumerSteps = map[inboxtest.Step]string{
	inboxtest.AtOpen: "open", inboxtest.AtStart: "start", inboxtest.AtReceive: "receive", inboxtest.AtAck: "ack",
	inboxtest.AtGiveBack: "give back", inboxtest.AtMove: "move", inboxtest.AtStop: "stop", inboxtest.AtClose: "close",
}

// outcomes are the faults of these steps.
var outcomes = map[kind]inboxtest.Outcome{
	refused: inboxtest.FailBefore, killedBefore: inboxtest.FailBefore,
	lost: inboxtest.FailAfter, killedAfter: inboxtest.FailAfter,
	hung: inboxtest.Hang, ended: inboxtest.EndSession, vanished: inboxtest.Lose, unwanted: inboxtest.Refuse,
}

// atQueue is what becomes of a step between a consumer and its queue.
func (p *process) atQueue(at inboxtest.Step, _ *inbox.Message) inboxtest.Outcome {
	step := consumerSteps[at]
	p.thawed()
	if p.dead.Load() || p.world.isAway(shoptest.RabbitMQ) {
		return inboxtest.FailBefore
	}
	k, r := p.world.fault(p.name, step, p.count(step))
	switch k {
	case killedBefore, killedAfter:
		p.kill()
	case frozenBefore:
		p.freeze(r.between(time.Second, 20*time.Second))
		p.thawed()
	case frozenAfter:
		p.freeze(r.between(time.Second, 20*time.Second))
	}
	return outcomes[k]
}

// fault rolls what goes wrong when a process takes a step for the n-th time.
func (w *world) fault(name, step string, n uint64) (kind, roll) {
	if !w.isFaulty() {
		return "", 0
	}
	r := w.dice.rollFor(name, step, n+1<<33)
	x := r.float()
	for _, k := range possible[step] {
		if x -= w.plan.rates[k]; x < 0 {
			if w.fires(k, fmt.Sprintf("%s, %s %d", name, step, n)) {
				return k, r.next()
			}
			return "", 0
		}
	}
	return "", 0
}
