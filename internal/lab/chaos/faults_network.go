package main

import (
	"context"
	"fmt"
	"time"

	"github.com/holdfast-go/holdfast/internal/testenv"
)

// linked are the roles that keep connections to a server. Every process dials RabbitMQ when it starts, to declare what it
// needs there, and only the relay and the consumer stay connected.
var linked = []struct {
	server testenv.Kind
	roles  []string
}{
	{testenv.Postgres, []string{"api", "relay", "consumer", "sweeper"}},
	{testenv.Redis, []string{"api"}},
	{testenv.RabbitMQ, []string{"relay", "consumer"}},
}

// longer is above the timeouts and pauses of most parts.
const longer = 23 * time.Second

// ofRole are processes of a role: one, or all.
func (d *dealer) ofRole(role string) (name string, of []*process) {
	of = d.s.named(role)
	if d.rng.IntN(2) == 0 {
		return "every " + role, of
	}
	p := pick(d.rng, of)
	return p.Name, []*process{p}
}

// toLinks returns a fault of the network for each server and role that has connections to it, and for each server and all
// of the processes. Nil for end is for what is over as soon as it has begun.
func (d *dealer) toLinks(begin, end func(*testenv.Proxy)) []fault {
	var all []fault
	for _, l := range linked {
		for _, role := range l.roles {
			name, of := d.ofRole(role)
			all = append(all, d.toLink(l.server, name, of, begin, end))
		}
		all = append(all, d.toLink(l.server, "all", d.s.processes, begin, end))
	}
	if end != nil {
		all[d.rng.IntN(len(all))].lasts = longer
	}
	return all
}

func (d *dealer) toLink(server testenv.Kind, name string, of []*process, begin, end func(*testenv.Proxy)) fault {
	each := func(do func(*testenv.Proxy)) func(context.Context) error {
		return func(context.Context) error {
			for _, p := range of {
				do(p.links[server])
			}
			return nil
		}
	}
	f := fault{target: fmt.Sprintf("%s of %s", server, name), begin: each(begin)}
	if end != nil {
		f.lasts, f.end = d.brief(), each(end)
	}
	return f
}

func (d *dealer) cuts() []fault { return d.toLinks((*testenv.Proxy).Cut, (*testenv.Proxy).Heal) }

func (d *dealer) delays() []fault {
	late := time.Duration(20+d.rng.IntN(280)) * time.Millisecond
	return d.toLinks(func(p *testenv.Proxy) { p.Delay(late) }, func(p *testenv.Proxy) { p.Delay(0) })
}

// halfOpens end as soon as they have begun: new connections are served, the old ones are never reset.
func (d *dealer) halfOpens() []fault { return d.toLinks((*testenv.Proxy).SilenceConnections, nil) }

func (d *dealer) lostBytes() []fault {
	return d.toLinks((*testenv.Proxy).DropReplies, (*testenv.Proxy).Heal)
}
