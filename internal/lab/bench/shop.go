package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/holdfast-go/holdfast/internal/lab/load"
	"github.com/holdfast-go/holdfast/internal/lab/shop"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

func shopWorkload() workload {
	return workload{"shop", []part{{"50", benchShop}}}
}

// Contenders, each in one process.
const (
	wholeShop    = "holdfast, all roles"
	shopAlone    = "holdfast, api alone"
	wholeGuarded = "bare SQL by hand: lock, key, limit, outbox row"
	wholeLocked  = "bare SQL, SELECT FOR UPDATE"
)

// bareShop is the command that holds seats without the packages of the shop.
const bareShop = "github.com/holdfast-go/holdfast/internal/lab/bench/bareshop"

// bareFaster: bare SQL may sell this many times more than a shop.
const bareFaster = 3

// Columns of a shop's table.
const (
	colRequests = iota
	colAnswer50
	colAnswer99
	colErrors
	colOversold
	colLearnt50
	colLearnt99
)

var shopColumns = []string{
	colRequests: "requests/s",
	colAnswer50: "p50 ms",
	colAnswer99: "p99 ms",
	colErrors:   "errors",
	colOversold: "oversold",
	colLearnt50: "read model p50 ms",
	colLearnt99: "p99 ms",
}

// shopWarmUp is how long a run warms up its new processes and connections before it measures.
const shopWarmUp = time.Second

// program holds seats over HTTP.
type program struct {
	name  string
	path  string
	flags []string
	// silent means that the program has no read model.
	silent bool
	// told collects the answers to clients in all runs.
	told shop.Answers
}

// benchShop makes clients hold seats in examples/reservation over HTTP, and does the same holds as bare SQL: with the
// lock on the seat alone, and with a key, a limit and a row of an outbox in the same transaction. Nobody relays that row,
// as nobody relays the messages of the api alone.
// Requests, answers, tables and connections equal the shop's. Each client sends its next request when it has an answer. A rate counts the clients who got their seat or the answer that it is taken.
// Clients, processes and servers share the machine. Each run has a fresh database, virtual host and Redis. A seat that
// is sold twice fails the benchmark.
func benchShop(ctx context.Context, b *bench) {
	const clients = 50
	b.openShops(ctx)
	bare := must(shop.Build(ctx, bareShop))
	flags := []string{"-backend=services", "-user-limit=1000000000", "-global-limit=1000000000"}
	all := []*program{
		{name: wholeShop, path: must(shop.Binary()), flags: flags},
		{name: shopAlone, path: must(shop.Binary()), flags: append(flags, "-role=api"), silent: true},
		{name: wholeGuarded, path: bare, flags: []string{"-guarded"}, silent: true},
		{name: wholeLocked, path: bare, silent: true},
	}
	t := table{title: fmt.Sprintf("whole shop in one process, clients: %d", clients), columns: shopColumns, yardsticks: []string{wholeGuarded}}
	for _, s := range all {
		s.told = shop.Answers{}
		t.contenders = append(t.contenders, contender{s.name, func(ctx context.Context, length time.Duration) sample {
			if length < b.length { // each run warms up its own processes
				return make(sample, len(shopColumns))
			}
			return must(s.run(ctx, b, clients, length))
		}})
	}
	r := b.measure(ctx, t)
	fmt.Fprintln(b.out)
	var err error
	for _, s := range all {
		fmt.Fprintf(b.out, "answers, %s: %s\n", s.name, s.told)
		if sold := r.column(s.name, colOversold).most; sold > 0 {
			err = errors.Join(err, fmt.Errorf("%s: %.0f seats are sold twice", s.name, sold))
		}
		if wrong := r.column(s.name, colErrors).most; wrong > 0 {
			err = errors.Join(err, fmt.Errorf("%s: %.0f errors", s.name, wrong))
		}
	}
	check(err)
	b.atLeast(0.6, r.ratio(shopAlone, wholeGuarded), fmt.Sprintf("of %s, %s, clients: %d", wholeGuarded, shopAlone, clients))
}

// openShops starts the servers of shops on first use.
func (b *bench) openShops(ctx context.Context) {
	if b.shops != nil {
		return
	}
	b.shops = must(shop.Open(ctx))
	b.atEnd(func() error {
		err := b.shops.Close()
		b.shops = nil
		return err
	})
}

// run starts a program on empty servers, and ends it.
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
	defer func() { err = errors.Join(err, shop.Roles{process}.Stop()) }()
	if err := process.AwaitListening(testenv.Patience); err != nil {
		return nil, fmt.Errorf("%w:\n%s", err, process.Log())
	}
	seats := bareFaster * shop.EnoughSeats(shopWarmUp+length)
	hall, err := shop.OpenHall(ctx, process.URL(), clients, seats)
	if err != nil {
		return nil, err
	}
	defer hall.Close()
	return b.measureShop(ctx, hall, data, clients, length, p.silent, p.told), nil
}

// measureShop warms up a shop, makes clients hold seats, and adds their answers to total. silent means that there is no
// read model.
func (b *bench) measureShop(ctx context.Context, h *shop.Hall, data *shop.Data, clients int, length time.Duration, silent bool, total shop.Answers) sample {
	rush := func(length time.Duration) (load.Load, shop.Answers, error) {
		l, err := load.Drive(ctx, clients, length, h.Hold)
		if err == nil && !silent {
			err = data.UntilLearnt(ctx)
		}
		return l, h.TakeAnswers(), err
	}
	check(data.Vacuum(ctx))
	_, warm, err := rush(shopWarmUp)
	check(err)
	began := must(data.Now(ctx))
	end := b.observe()
	l, told, err := rush(length)
	end()
	check(err)
	total.Add(told)
	oversold := must(data.Audit(ctx, warm[shop.AnswerHeld]+told[shop.AnswerHeld]))
	learnt := [2]float64{math.NaN(), math.NaN()}
	if !silent {
		learnt, err = data.Learnt(ctx, began)
	}
	check(err)
	return sample{
		colRequests: l.Rate,
		colAnswer50: milliseconds(l.Percentile(0.5)), colAnswer99: milliseconds(l.Percentile(0.99)),
		colErrors: float64(told.Errors()), colOversold: float64(oversold),
		colLearnt50: learnt[0], colLearnt99: learnt[1],
	}
}
