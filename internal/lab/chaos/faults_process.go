package main

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"syscall"
	"time"

	"github.com/holdfast-go/holdfast/internal/lab/harness"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// endPatience is how long a process may take to end: what the shop allows itself, and as much again for a busy machine.
const endPatience = 90 * time.Second

// victims are the processes that something happens to: one of each role, and all of one.
func (d *dealer) victims() map[string][]*process {
	all := map[string][]*process{}
	names := []string{"api", "relay", "consumer", "sweeper"}
	for _, role := range names {
		p := pick(d.rng, d.s.named(role))
		all[p.Name] = []*process{p}
	}
	role := pick(d.rng, names)
	all["every "+role] = d.s.named(role)
	return all
}

// toVictims returns a fault for each of some processes.
func (d *dealer) toVictims(what string, begin, end func(ctx context.Context, p []*process) error) []fault {
	var all []fault
	victims := d.victims()
	for _, name := range sortedKeys(victims) {
		all = append(all, d.fault(name+what,
			func(ctx context.Context) error { return begin(ctx, victims[name]) },
			func(ctx context.Context) error { return end(ctx, victims[name]) }))
	}
	return all
}

func (d *dealer) processKills() []fault {
	return d.toVictims(" killed",
		func(_ context.Context, victims []*process) error {
			errs := make([]error, len(victims))
			for i, p := range victims {
				errs[i] = p.kill()
			}
			return errors.Join(errs...)
		},
		func(_ context.Context, victims []*process) error { return d.s.replace(victims...) })
}

// kill ends the process. One that has ended by itself breaks a promise, which its successor would hide.
func (p *process) kill() error {
	if p.Ended() {
		return fmt.Errorf("%w: %s", harness.ErrPromise, harness.EndedByItself(p.Name))
	}
	p.Kill()
	return nil
}

// killedInHand are processes that are killed when they have messages in hand: their server holds the answers.
func (d *dealer) killedInHand() []fault {
	inHand := func(role string, kind testenv.Kind) fault {
		p := pick(d.rng, d.s.named(role))
		f := d.fault(p.Name+" killed with messages in hand",
			func(context.Context) error {
				p.links[kind].Pause()
				return nil
			},
			func(context.Context) error {
				killed := p.kill()
				p.links[kind].Resume()
				return errors.Join(killed, d.s.replace(p))
			})
		f.lasts = time.Second
		return f
	}
	return []fault{inHand("relay", testenv.RabbitMQ), inHand("consumer", testenv.Postgres)}
}

func (d *dealer) processStops() []fault {
	all := func(sig syscall.Signal) func(context.Context, []*process) error {
		return func(_ context.Context, victims []*process) error {
			for _, p := range victims {
				if err := p.Signal(sig); err != nil {
					return err
				}
			}
			return nil
		}
	}
	return d.toVictims(" stopped", all(syscall.SIGSTOP), all(syscall.SIGCONT))
}

func (d *dealer) processRestarts() []fault {
	faults := d.toVictims(" restarted",
		func(_ context.Context, victims []*process) error { return d.s.terminate(victims...) },
		func(_ context.Context, victims []*process) error { return d.s.replace(victims...) })
	for i := range faults {
		faults[i].lasts = 0
	}
	return faults
}

// terminate asks processes to end, and waits until they have.
func (s *system) terminate(processes ...*process) error {
	errs := make([]error, len(processes))
	var ending sync.WaitGroup
	for i, p := range processes {
		ending.Go(func() {
			if _, err := p.Terminate(endPatience); err != nil {
				p.Kill()
				errs[i] = fmt.Errorf("%w: %w", harness.ErrPromise, err)
			}
		})
	}
	ending.Wait()
	return errors.Join(errs...)
}

// deploys replaces one process after the other by the version before, and then by this one again.
func (d *dealer) deploys() []fault {
	if d.previous == "" {
		return nil
	}
	roll := func(ctx context.Context, binary string) error {
		for _, i := range d.rng.Perm(len(d.s.processes)) {
			p := d.s.processes[i]
			if err := d.s.terminate(p); err != nil {
				return err
			}
			if err := p.Start(binary); err != nil {
				return err
			}
			if err := p.AwaitListening(harness.StartPatience); err != nil {
				return err
			}
		}
		return nil
	}
	f := d.fault("every process, one after the other",
		func(ctx context.Context) error { return roll(ctx, d.previous) },
		func(ctx context.Context) error { return roll(ctx, d.s.binary) })
	return []fault{f}
}
