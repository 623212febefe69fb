package outbox

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/trace"

	"github.com/holdfast-go/holdfast/internal/ids"
	"github.com/holdfast-go/holdfast/outbox/driver"
)

// pipeline publishes one batch. All unkeyed messages and the first message of each key are in flight at
// once. A confirm releases the next message of the key.
type pipeline struct {
	transports transports
	messages   []driver.Message
	unread     map[int]error   // why messages could not be read, by index
	life       context.Context // the relay's context: when it ends, the relay shuts down
	send       context.Context // derived from life; when it ends, the pipeline sends no more messages
	wait       context.Context // when it ends, the pipeline stops waiting for confirms

	startSend func(m driver.Message) trace.Span       // returns nil if no span is recorded
	confirmed func(m driver.Message, begin time.Time) // observes a confirm

	senders map[string]*sender // by transport
	sending sync.WaitGroup
	results chan result      // has room for every message, so done never blocks
	behind  map[string][]int // by key: the messages behind the one in flight
	open    int              // queued or in flight, over all transports
}

var errUnconfirmed = errors.New("no confirm within PublishTimeout")

// result is the outcome of a message: confirmed, failed, or not sent.
type result struct {
	index  int
	unsent bool
	err    error
	at     time.Time // of the error
}

// outcome is the final outcome of a message in the pipeline. The zero value means released unchanged.
type outcome struct {
	done bool  // confirmed or failed
	err  error // nil: confirmed
}

// run returns the outcome of each message, and the transports that were unavailable, with the reason.
func (p *pipeline) run() ([]outcome, map[string]outage) {
	p.start()
	outcomes := make([]outcome, len(p.messages))
	down := map[string]outage{}
	for p.open > 0 {
		select {
		case r := <-p.results:
			p.take(r, outcomes, down)
		case <-p.wait.Done():
			p.unconfirmed(outcomes, down)
		}
	}
	for _, s := range p.senders {
		close(s.queue)
	}
	p.sending.Wait()
	return outcomes, down
}

func (p *pipeline) start() {
	p.senders = map[string]*sender{}
	p.results = make(chan result, len(p.messages))
	p.behind = map[string][]int{}
	inFlight := map[string]bool{}
	for i, m := range p.messages {
		if m.Key != "" && inFlight[m.Key] {
			p.behind[m.Key] = append(p.behind[m.Key], i)
			continue
		}
		inFlight[m.Key] = true
		p.release(i)
	}
}

func (p *pipeline) release(i int) {
	name := p.messages[i].Transport
	s, ok := p.senders[name]
	if !ok {
		s = &sender{transport: p.transports.named(name), queue: make(chan int, len(p.messages))}
		p.senders[name] = s
		p.sending.Go(func() { s.run(p) })
	}
	p.open++
	s.open++
	s.queue <- i
}

// done returns the function that receives the outcome of message i, which is sent now. Only its first
// call counts.
func (p *pipeline) done(i int) func(error) {
	begin, span := time.Now(), p.startSend(p.messages[i])
	var called atomic.Bool
	return func(err error) {
		if !called.CompareAndSwap(false, true) {
			return
		}
		err = sound(err)
		endSend(span, err)
		r := result{index: i, err: err}
		if err == nil {
			p.confirmed(p.messages[i], begin)
		} else {
			r.at = time.Now()
		}
		p.results <- r
	}
}

// sound returns err, or another error if the methods of err panic, like the methods of a nil pointer.
func sound(err error) (safe error) {
	defer func() {
		if v := recover(); v != nil {
			safe = fmt.Errorf("the error, a %T, is unusable: %v", err, v)
		}
	}()
	if err != nil {
		_, _, _ = err.Error(), driver.ClassOf(err), errors.Is(err, errUnconfirmed) // the relay calls the same methods
	}
	return err
}

// unfit returns the reason why a message cannot be published. Another program may have stored it, without our
// writers. unfit checks the id and the name, because consumers depend on them. Publishers check the rest.
func (p *pipeline) unfit(i int) error {
	if err := p.unread[i]; err != nil {
		return err
	}
	if err := ids.Check(p.messages[i].ID); err != nil {
		return err
	}
	if err := driver.CheckName(p.messages[i].Name); err != nil {
		return fmt.Errorf("name %w", err)
	}
	return nil
}

func (p *pipeline) take(r result, outcomes []outcome, down map[string]outage) {
	m := p.messages[r.index]
	p.open--
	p.senders[m.Transport].open--
	switch {
	case r.unsent:
	case r.err == nil:
		outcomes[r.index] = outcome{done: true}
		if next := p.behind[m.Key]; m.Key != "" && len(next) > 0 {
			p.behind[m.Key] = next[1:]
			p.release(next[0])
		}
	case pauses(driver.ClassOf(r.err)):
		p.setDown(m.Transport, outage{r.err, r.at}, down)
	default:
		outcomes[r.index] = outcome{done: true, err: r.err}
	}
}

// unconfirmed takes the results reported until now. Transports with further unconfirmed messages are unavailable.
func (p *pipeline) unconfirmed(outcomes []outcome, down map[string]outage) {
	p.behind = nil // nothing more is released
	for len(p.results) > 0 {
		p.take(<-p.results, outcomes, down)
	}
	p.open = 0
	if p.life.Err() != nil {
		return // shutting down: the transports may be fine
	}
	for name, s := range p.senders {
		if s.open > 0 {
			p.setDown(name, outage{&driver.PublishError{Class: driver.Unavailable, Err: errUnconfirmed}, time.Now()}, down)
		}
	}
}

func (p *pipeline) setDown(transport string, why outage, down map[string]outage) {
	if _, known := down[transport]; !known {
		down[transport] = why
	}
	p.senders[transport].down.Store(true)
}
