package main

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/holdfast-go/holdfast/internal/lab/versions"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// versions are those of the servers.
func (h *house) versions(ctx context.Context) (all []string, err error) {
	for _, s := range []*testenv.Server{h.primary, h.redis[0], h.rabbit[0]} {
		product, version, err := versions.Ask(ctx, s)
		if err != nil {
			return nil, err
		}
		all = append(all, product+" "+version)
	}
	return all, nil
}

const introduction = `
Five hosts, each a network namespace with an address of its own: on three of them a RabbitMQ of
three nodes with quorum queues (` + "`pause_minority`" + `), a Redis Cluster of six (each primary with a replica on another host),
and a Postgres with a synchronous standby, whose address moves to the standby; on the other two each role of the
[ticket shop](../../../examples/reservation/README.md) once, behind a PgBouncer in transaction mode.
`

// render is the report.
func render(head string, servers []string, scale rates, v verdict, took time.Duration) string {
	var text strings.Builder
	fmt.Fprintf(&text, "# Clusters\n\n%s\n%s\nServers: %s. It took %.0f minutes.\n", head, introduction, strings.Join(servers, ", "), took.Minutes())
	text.WriteString(`
## Faults

Customers buy meanwhile, and a stream of messages with ordering keys goes through an outbox and a quorum queue. A number is
how many seconds after the end of the fault a symptom was seen for the last time; a fault with an end lasts ` + fmt.Sprint(outage) + `.
"Held meanwhile" are the seats that customers got while it lasted. The goal is that all is well after ` + fmt.Sprint(goal) + `.

| fault | held meanwhile | all |`)
	for _, s := range symptoms {
		fmt.Fprintf(&text, " %s |", s)
	}
	fmt.Fprintf(&text, "\n|---|---|---|%s\n", strings.Repeat("---|", len(symptoms)))
	for _, r := range v.recoveries {
		all := fmt.Sprintf("%.1f", r.total().Seconds())
		switch {
		case r.err != nil:
			all = "**not well**"
		case r.total() > goal:
			all = "**" + all + "**"
		}
		fmt.Fprintf(&text, "| %s | %d | %s |", r.fault, r.held, all)
		for _, s := range symptoms {
			fmt.Fprintf(&text, " %.1f |", r.after[s].Seconds())
		}
		text.WriteByte('\n')
	}
	text.WriteString(crashLines(v.crashes))
	fmt.Fprintf(&text, `
## What was kept

- The shop: %d requests, %d seats held by as many keys. Each answer was compared with the database, each reservation with its
  seats, each of its two messages with the read model.
- The stream: %s.
`, v.requests, v.held, v.stream)
	if len(v.faults) == 0 {
		text.WriteString("\nNothing was lost, doubled or out of order within its key.\n")
	} else {
		text.WriteString("\nWrong:\n\n")
		for _, f := range v.faults {
			fmt.Fprintf(&text, "- %s\n", strings.ReplaceAll(f, "\n", "; "))
		}
	}
	if scale != nil {
		text.WriteString(scale.render())
	}
	return text.String()
}

// crashLines tell of each fault in which PgBouncer ended by itself. That is no fault of the shop, which has to be well
// again like after any other.
func crashLines(crashes []crash) string {
	if len(crashes) == 0 {
		return "\nNo PgBouncer ended by itself.\n"
	}
	var text strings.Builder
	fmt.Fprintf(&text, "\nEnds of a PgBouncer by itself, after each of which the supervisor of its host started it again: %d\n\n", len(crashes))
	for _, c := range crashes {
		fmt.Fprintf(&text, "- on %s, in \"%s\": `%s`\n", c.host, c.during, c.said)
	}
	return text.String()
}

// render is the table of ratios.
func (r rates) render() string {
	var text strings.Builder
	fmt.Fprintf(&text, `
## More of each role

Each role alone, on work that waits (%d reservations that are due, then their messages), and the api with %d clients. The middle of
%d runs, divided by that of one process. Processes, clients and servers share this machine's processors, so a ratio says what more
processes cost here, and that they share the work; on machines of their own they have more to gain.

| role |`, backlog, clients, rounds)
	for _, n := range counts {
		fmt.Fprintf(&text, " %d |", n)
	}
	fmt.Fprintf(&text, " per second with one |\n|---|%s---|\n", strings.Repeat("---|", len(counts)))
	row := func(role, unit string) {
		fmt.Fprintf(&text, "| %s |", role)
		for _, n := range counts {
			fmt.Fprintf(&text, " %.2f |", r[role][n]/r[role][1])
		}
		fmt.Fprintf(&text, " %.0f %s |\n", r[role][1], unit)
	}
	row(apiRole, apiUnit)
	for _, s := range stages {
		row(s.role, s.unit)
	}
	return text.String()
}
