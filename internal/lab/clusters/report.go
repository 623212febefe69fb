package main

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/holdfast-go/holdfast/internal/lab/harness"
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
func render(head string, servers []string, v verdict, took time.Duration) string {
	var text strings.Builder
	fmt.Fprintf(&text, "# Clusters\n\n%s\n%s\nServers: %s. It took %.0f minutes.\n", head, introduction, strings.Join(servers, ", "), took.Minutes())
	text.WriteString(`
## Faults

Customers buy meanwhile. A number is
how many seconds after the end of the fault a symptom was seen for the last time; a fault with an end lasts ` + fmt.Sprint(outage) + `.
"Held meanwhile" are the seats that customers got while it lasted. The goal is that all is well after ` + fmt.Sprint(harness.Goal) + `.

| fault | held meanwhile | all |`)
	for _, s := range harness.Symptoms {
		fmt.Fprintf(&text, " %s |", s)
	}
	fmt.Fprintf(&text, "\n|---|---|---|%s\n", strings.Repeat("---|", len(harness.Symptoms)))
	for _, o := range v.outcomes {
		all := fmt.Sprintf("%.1f", o.Recovery)
		if o.Slow {
			all = "**" + all + "**"
		}
		fmt.Fprintf(&text, "| %s: %s | %d | %s |", o.Kind, o.Target, o.Held, all)
		for _, s := range harness.Symptoms {
			fmt.Fprintf(&text, " %.1f |", o.After[s])
		}
		text.WriteByte('\n')
	}
	text.WriteString(crashLines(v.crashes))
	fmt.Fprintf(&text, `
## What was kept

- The shop: %d requests, %d seats held by as many keys. Each answer was compared with the database, each reservation with its
  seats, each of its two messages with the read model.
- The broker, in the order of each reservation: %s.
`, v.requests, v.held, v.broker)
	if len(v.faults) == 0 {
		text.WriteString("\nNothing was lost, doubled or out of order within its key.\n")
	} else {
		text.WriteString("\nWrong:\n\n")
		for _, f := range v.faults {
			fmt.Fprintf(&text, "- %s\n", strings.ReplaceAll(f, "\n", "; "))
		}
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
