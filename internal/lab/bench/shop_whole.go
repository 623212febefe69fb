package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/holdfast-go/holdfast/internal/lab/shop"
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

// programs builds them. In a clone without the earlier commit that one is left out, which is said.
func (b *bench) programs(ctx context.Context) []*composition {
	whole := []string{"-backend=services", "-user-limit=1000000000", "-global-limit=1000000000"}
	now := must(shop.Binary())
	bare := must(shop.Build(ctx, bareShop))
	all := []*composition{
		{name: wholeNow, path: now, flags: whole},
		{name: wholeLocked, path: bare, silent: true},
		{name: wholeAtOnce, path: bare, silent: true, flags: []string{"-one-statement"}},
	}
	once, err := shop.BinaryOf(ctx, onceCommit)
	if errors.Is(err, shop.ErrNoCommit) {
		fmt.Fprintf(b.out, "\nwithout a comparison: %v\n", err)
		return all
	}
	check(err)
	return append(all, &composition{name: wholeOnce, path: once, flags: whole})
}

// benchWhole compares the shop, with all roles in one process, with itself at an earlier commit, and with the same holds
// as bare SQL: requests over HTTP, answers, tables and connections are as in the shop, in a process of its own, and of
// all guarantees there is only the lock on the seat. The goal is held against a transaction that locks, reads and
// writes, as the shop does; one statement is the bound of what there can be. Each run has a fresh database, virtual
// host and Redis.
func benchWhole(clients int) func(context.Context, *bench) {
	return func(ctx context.Context, b *bench) {
		all := b.programs(ctx)
		var others []string
		for _, p := range all[1:] {
			others = append(others, p.name)
		}
		r := b.compareShops(ctx, fmt.Sprintf("whole shop in one process, clients: %d", clients), all, clients, others...)
		for _, name := range others {
			switch name {
			case wholeOnce:
				b.atLeast(2, r.ratio(wholeNow, name), fmt.Sprintf("whole shop / at commit %s, clients: %d", onceCommit, clients))
			case wholeLocked:
				b.atLeast(0.5, r.ratio(wholeNow, name), fmt.Sprintf("whole shop / %s, clients: %d", name, clients))
			}
		}
		b.atMost(0, r.column(wholeNow, colErrors), fmt.Sprintf("errors of the whole shop, clients: %d", clients))
	}
}
