package core

import (
	"slices"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/outbox"
)

// Messages that wait for an attempt have the methods of dead letters, so they are places, too: a place for each outbox
// and consumer that can list them. Changes of them are retry, which makes the next attempt due now, postpone and drop.

// retryingFlag selects messages that wait for an attempt, in commands and in the log.
const retryingFlag = "--retrying"

// Postponing is the change that makes messages wait longer.
const Postponing = "postpone"

// retryingOutbox is a store that lists messages that wait for an attempt.
type retryingOutbox interface {
	Parked() outbox.DeadLetters
}

// retryingConsumer is a consumer that lists messages that wait for an attempt. On NATS the server cannot list them.
type retryingConsumer interface {
	Retrying() inbox.DeadLetters
}

// retryingPlaces returns the places that can list messages that wait for an attempt, outboxes first.
func (o *Operator) retryingPlaces() []Place {
	var all []Place
	for _, b := range o.Config.Outboxes {
		if store, ok := b.Store.(retryingOutbox); ok {
			_, audits := b.Store.(auditor)
			all = append(all, Place{b.Name, KindOutbox, true, deadLetters[outbox.Message]{b.Name, store.Parked(), audits, nil, ofOutbox}})
		}
	}
	for _, c := range o.Config.Consumers {
		if consumer, ok := c.Consumer.(retryingConsumer); ok {
			all = append(all, Place{c.Name, KindInbox, true, deadLetters[inbox.Message]{c.Name, consumer.Retrying(), false, o.waits, ofConsumer}})
		}
	}
	return all
}

// ChosenRetrying is Chosen for messages that wait for an attempt. Without names it leaves out Unlisted.
func (o *Operator) ChosenRetrying(names []string, kind string) ([]Place, error) {
	for _, name := range names {
		if slices.Contains(o.Unlisted(), name) {
			return nil, Mistakef("--from: the server of %s cannot list messages that wait for an attempt", name)
		}
	}
	return chosen(o.retryingPlaces(), names, kind)
}

// Unlisted returns the names of the outboxes and consumers that cannot list messages that wait for an attempt.
func (o *Operator) Unlisted() (names []string) {
	for _, b := range o.Config.Outboxes {
		if _, ok := b.Store.(retryingOutbox); !ok {
			names = append(names, b.Name)
		}
	}
	for _, c := range o.Config.Consumers {
		if _, ok := c.Consumer.(retryingConsumer); !ok {
			names = append(names, c.Name)
		}
	}
	return names
}

// flags formats a selection in a place for the log.
func (p Place) flags(f Filter) string {
	if p.Retrying {
		return retryingFlag + " " + Flags(f)
	}
	return Flags(f)
}

// done is the verb of a change that is over.
var done = map[string]string{"retry": "retried", "drop": "dropped", Postponing: "postponed"}

// Done returns the past participle of a change: retried, dropped or postponed.
func Done(what string) string { return done[what] }

// Noun returns the name of the messages of a selection: dead letters, or messages that wait for an attempt.
func (t Typed) Noun() string {
	if t.Retrying {
		return "waiting message"
	}
	return "dead letter"
}

// auditedRetrying are the actions in the audit of an outbox that changed messages that wait for an attempt.
var auditedRetrying = []string{"retry", "drop", Postponing}

// chosenBy formats the selection in an entry of an outbox's audit.
func chosenBy(action string, f Filter) string {
	return Place{Retrying: slices.Contains(auditedRetrying, action)}.flags(f)
}
