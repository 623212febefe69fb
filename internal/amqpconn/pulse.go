package amqpconn

import (
	"fmt"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
)

const (
	// pulseInterval is the time between an answer and the next question.
	pulseInterval = 2 * time.Second
	// pulsePatience is how long an answer may take.
	pulsePatience = 5 * time.Second
	// slowest is the rate, in bytes per second, at which a connection still counts as working.
	slowest = 1 << 20
)

// Watch asks the broker every two seconds whether it is there, until the connection ends. It ends
// the connection when an answer takes longer than five seconds: a connection to a broker that has
// vanished stays open, and the client's heartbeats notice it after 15 seconds or later.
//
// Pending returns how many bytes are on their way, and each MiB of them allows one more second;
// nil counts none. While the broker blocks the connection it answers nothing, and need not.
func (c *Conn) Watch(pending func() int) error {
	ch, err := c.Channel()
	if err != nil {
		return fmt.Errorf("open channel: %w", err)
	}
	go c.watchAnswers(ch, pending)
	return nil
}

func (c *Conn) watchAnswers(ch *amqp.Channel, pending func() int) {
	next := time.NewTimer(pulseInterval)
	defer next.Stop()
	for {
		select {
		case <-c.done:
			return
		case <-next.C:
		}
		if !c.answers(ch, pending) {
			c.kill()
			return
		}
		next.Reset(pulseInterval)
	}
}

// answers asks once. It waits in two halves, so that a pause of this process counts as one half.
func (c *Conn) answers(ch *amqp.Channel, pending func() int) bool {
	answered := make(chan error, 1)
	go func() { answered <- ch.Qos(0, 0, false) }() // changes nothing, and ends with the connection
	patience := pulsePatience
	if pending != nil {
		patience += time.Duration(pending()) * time.Second / slowest
	}
	for silent := 0; silent < 2; {
		_, before := c.Blocked()
		select {
		case <-answered: // an error is an answer too
			return true
		case <-c.done:
			return true
		case <-time.After(patience / 2):
		}
		if _, now := c.Blocked(); !before && !now {
			silent++
		}
	}
	return false
}
