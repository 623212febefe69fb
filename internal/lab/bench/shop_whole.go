package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/holdfast-go/holdfast/internal/lab/shop"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// Contenders of the whole shop in one process.
const (
	wholeNow    = "holdfast, all roles"
	wholeOnce   = "the same at commit " + onceCommit
	wholeLocked = "bare SQL, SELECT FOR UPDATE"
	wholeAtOnce = "bare SQL, one statement"
)

// onceCommit is what the shop's rate is compared with.
const onceCommit = "fd0b5d8"

// bareShop is the command that holds seats without the guarantees of the shop.
const bareShop = "github.com/holdfast-go/holdfast/internal/lab/bench/bareshop"

// bareFaster is how many times more than a shop bare SQL may sell.
const bareFaster = 3

// program is a shop in one process.
type program struct {
	name, path string
	flags      []string
	// silent says that there is no read model.
	silent bool
	// told is what clients were answered in all runs.
	told shop.Answers
}

// programs builds them. In a clone without the earlier commit that one is left out, which is said.
func (b *bench) programs(ctx context.Context) []*program {
	whole := []string{"-backend=services", "-user-limit=1000000000", "-global-limit=1000000000"}
	now := must(shop.Binary())
	bare := must(shop.Build(ctx, bareShop))
	all := []*program{
		{name: wholeNow, path: now, flags: whole, told: shop.Answers{}},
		{name: wholeLocked, path: bare, silent: true, told: shop.Answers{}},
		{name: wholeAtOnce, path: bare, silent: true, told: shop.Answers{}, flags: []string{"-one-statement"}},
	}
	once, err := shop.BinaryOf(ctx, onceCommit)
	if errors.Is(err, shop.ErrNoCommit) {
		fmt.Fprintf(b.out, "\nwithout a comparison: %v\n", err)
		return all
	}
	check(err)
	return append(all, &program{name: wholeOnce, path: once, flags: whole, told: shop.Answers{}})
}

// benchWhole compares the shop, with all roles in one process, with itself at an earlier commit, and with the same holds
// as bare SQL: requests over HTTP, answers, tables and connections are as in the shop, in a process of its own, and of
// all guarantees there is only the lock on the seat. The goal is held against a transaction that locks, reads and
// writes, as the shop does; one statement is the bound of what there can be. Each run has a fresh database, virtual
// host and Redis.
func benchWhole(clients int) func(context.Context, *bench) {
	return func(ctx context.Context, b *bench) {
		b.openShops(ctx)
		all := b.programs(ctx)
		t := table{title: fmt.Sprintf("whole shop in one process, clients: %d", clients), columns: shopColumns}
		for _, p := range all {
			t.contenders = append(t.contenders, contender{p.name, func(ctx context.Context, length time.Duration) sample {
				if length < b.length { // each run warms up the process it starts
					return make(sample, len(shopColumns))
				}
				return must(p.run(ctx, b, clients, length))
			}})
			if p.name != wholeNow {
				t.yardsticks = append(t.yardsticks, p.name)
			}
		}
		r := b.measure(ctx, t)
		check(b.judgeWhole(r, all, clients))
	}
}

// judgeWhole prints what clients were answered, and notes the goals.
func (b *bench) judgeWhole(r results, all []*program, clients int) (err error) {
	fmt.Fprintln(b.out)
	for _, p := range all {
		fmt.Fprintf(b.out, "answers, %s: %s\n", p.name, p.told)
		if sold := r.column(p.name, colOversold).most; sold > 0 {
			err = errors.Join(err, fmt.Errorf("%s: %.0f seats are sold twice", p.name, sold))
		}
		switch p.name {
		case wholeOnce:
			b.atLeast(2, r.ratio(wholeNow, p.name), fmt.Sprintf("whole shop / at commit %s, clients: %d", onceCommit, clients))
		case wholeLocked:
			b.atLeast(0.5, r.ratio(wholeNow, p.name), fmt.Sprintf("whole shop / %s, clients: %d", p.name, clients))
		}
	}
	b.atMost(0, r.column(wholeNow, colErrors), fmt.Sprintf("errors of the whole shop, clients: %d", clients))
	return err
}

// run starts the program on servers without data, and ends it.
func (p *program) run(ctx context.Context, b *bench, clients int, length time.Duration) (_ sample, err error) {
	data, err := b.shops.NewData(ctx)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, data.Drop()) }()
	process := shop.New(p.name, data.Servers.Env(), p.flags...)
	if err := process.Start(p.path); err != nil {
		return nil, err
	}
	defer func() {
		_, ended := process.Terminate(shop.EndsWithin)
		process.Kill()
		err = errors.Join(err, ended)
	}()
	if err := process.AwaitListening(testenv.Patience); err != nil {
		return nil, fmt.Errorf("%w:\n%s", err, process.Log())
	}
	hall, err := shop.OpenHall(ctx, process.URL(), clients, bareFaster*shop.EnoughSeats(shopWarmUp+length))
	if err != nil {
		return nil, err
	}
	defer hall.Close()
	return b.measureShop(ctx, hall, data, clients, length, p.silent, p.told), nil
}
