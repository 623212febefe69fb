package inboxtest

import (
	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/internal/memqueue"
)

// Step is a step between a consumer and its queue at which Config.Fault may have something go wrong.
type Step int

// The steps. Those of a message are asked about each of them, AtScan when a dead letter is returned
// or removed; the others are asked without a message.
const (
	AtOpen     = Step(memqueue.Open)    // a session begins
	AtStart    = Step(memqueue.Start)   // it asks for deliveries
	AtReceive  = Step(memqueue.Receive) // a message is delivered
	AtAck      = Step(memqueue.Ack)     // it is acknowledged: its effect is durable already
	AtGiveBack = Step(memqueue.GiveBack)
	AtMove     = Step(memqueue.Move) // it is to be retried later, or to be a dead letter
	AtStop     = Step(memqueue.Stop) // no more deliveries, as before a pause
	AtClose    = Step(memqueue.Close)
	AtScan     = Step(memqueue.Scan)
)

// Outcome is what becomes of a step.
type Outcome int

// The outcomes. A call of a session that fails ends the session: what is not settled comes again,
// redelivered, after the next one was opened.
const (
	OK         = Outcome(memqueue.OK)
	FailBefore = Outcome(memqueue.FailBefore) // it fails, and nothing has happened
	FailAfter  = Outcome(memqueue.FailAfter)  // it fails although it has happened
	Hang       = Outcome(memqueue.Hang)       // it fails after 10 s, and nothing has happened
	EndSession = Outcome(memqueue.EndSession) // it works, and the session is lost right after it

	// Lose says that it worked, and it has not: the message comes again at once, redelivered. AtReceive
	// it is the crash before a message was processed, AtAck the crash after it. It is OK elsewhere.
	Lose = Outcome(memqueue.Lose)
	// Refuse is for AtMove: the place of retries or dead letters takes none. It is OK elsewhere.
	Refuse = Outcome(memqueue.Refuse)
)

// DeliverTwice is a Config.Fault: every message comes once more after it was processed.
func DeliverTwice(at Step, m *inbox.Message) Outcome {
	if at == AtAck && !m.Redelivered {
		return Lose
	}
	return OK
}
