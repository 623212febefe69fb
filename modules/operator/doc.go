// Package operator describes a service that is built on Holdfast to whoever operates it: a [Config] lists its outboxes,
// consumers, sweeps and limits. Three packages show the state of these, find dead letters, send them again or drop
// them, and do by hand what else runs in the background:
//
//   - page, a web page;
//   - command, commands for a terminal, as a program of their own (cmd/holdfast) or in the service's binary;
//   - agents, a server of the Model Context Protocol.
//
// A service compiles only those that it imports: the page brings neither the commands' libraries nor those of the agents.
//
//	service := operator.Config{
//		Outboxes:  []operator.Outbox{{Store: store, Relay: relay}},
//		Consumers: []operator.Consumer{{Name: "billing", Consumer: consumer, Inbox: books}},
//	}
//	handler, err := page.New(service, page.Config{})
//	os.Exit(command.Run(ctx, service, os.Args[1:], os.Stdout, os.Stderr))
package operator
