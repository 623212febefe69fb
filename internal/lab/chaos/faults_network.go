package main

import (
	"context"
	"time"

	"github.com/holdfast-go/holdfast/internal/testenv"
)

// scopes are the processes whose links something happens to: all, those of one role, or a single one.
func (d *dealer) scope() (name string, of []*process) {
	switch d.rng.IntN(3) {
	case 0:
		return "all", d.s.processes
	case 1:
		role := pick(d.rng, []string{"api", "relay", "consumer", "sweeper"})
		return "every " + role, d.s.named(role)
	default:
		p := pick(d.rng, d.s.processes)
		return p.Name, []*process{p}
	}
}

// toLinks returns a fault of the network before each server, for some processes.
func (d *dealer) toLinks(begin, end func(*testenv.Proxy)) []fault {
	var all []fault
	for _, kind := range []testenv.Kind{testenv.Postgres, testenv.Redis, testenv.RabbitMQ} {
		name, of := d.scope()
		each := func(do func(*testenv.Proxy)) func(context.Context) error {
			return func(context.Context) error {
				for _, p := range of {
					do(p.links[kind])
				}
				return nil
			}
		}
		all = append(all, d.fault(string(kind)+" of "+name, each(begin), each(end)))
	}
	return all
}

func (d *dealer) cuts() []fault { return d.toLinks((*testenv.Proxy).Cut, (*testenv.Proxy).Heal) }

func (d *dealer) delays() []fault {
	late := time.Duration(20+d.rng.IntN(280)) * time.Millisecond
	return d.toLinks(func(p *testenv.Proxy) { p.Delay(late) }, func(p *testenv.Proxy) { p.Delay(0) })
}

// halfOpens end as soon as they have begun: new connections are served, the old ones are never reset.
func (d *dealer) halfOpens() []fault {
	faults := d.toLinks((*testenv.Proxy).SilenceConnections, nil)
	for i := range faults {
		faults[i].lasts, faults[i].end = 0, nil
	}
	return faults
}

func (d *dealer) lostBytes() []fault {
	return d.toLinks((*testenv.Proxy).DropReplies, (*testenv.Proxy).Heal)
}
