// Package format has the type of the setting by which publishers and consumers know how messages look on
// the wire: Config.Format of outboxamqp, outboxredis, inboxamqp and inboxredis. Its values are
// symfony.Format and cloudevents.Format; nil is this module's own form, of which
// examples/guides/wire.md tells all. One value serves both sides of a program.
package format

// Format is how messages look on the wire. Only the types of this module are taken: a constructor
// refuses any other.
type Format interface {
	// Form names the form: "symfony" or "cloudevents".
	Form() string
}
