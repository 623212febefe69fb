// Package operator operates a service that is built on Holdfast: it shows the state of its outboxes,
// consumers, sweeps and limits, finds dead letters, sends them again or drops them, and does by hand
// what else runs in the background.
//
// A service that mounts it in its own binary lists what it has:
//
//	o, err := operator.New(operator.Config{
//		Outboxes:  []operator.Outbox{{Store: store, Relay: relay}},
//		Consumers: []operator.Consumer{{Name: "billing", Consumer: consumer, Inbox: books}},
//	})
//	os.Exit(o.Run(ctx, os.Args[1:], os.Stdout, os.Stderr))
//
// [Operator.Handler] is the same as a web page, [Operator.MCP] for agents, and [Operator.Command] for a program that has
// commands of its own. Package cmd/holdfast is a program of its own, which reads what the service has from a file.
//
// # Exit codes
//
//	0  done, or nothing to do
//	1  it failed, an id is no dead letter, or it found what must be looked at: a finding of doctor, a poisoned row, a message that
//	   relay could not publish
//	2  a mistake in the command line, or a relay that could not run
package operator
