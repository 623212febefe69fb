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
	return workload{"shop", []part{
		{"1", benchShop(1)},
		{"50", benchShop(50)},
		{"500", benchShop(500)},
		{"whole 1", benchWhole(1)},
		{"whole 50", benchWhole(50)},
	}}
}

// wholeShop is the contender that the others are divided by.
const wholeShop = "all layers"

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

var shopColumns = []column{
	colRequests: {name: "requests/s"},
	colAnswer50: {name: "p50 ms", decimals: 1},
	colAnswer99: {name: "p99 ms", decimals: 1},
	colErrors:   {name: "errors", most: true},
	colOversold: {name: "oversold", most: true},
	colLearnt50: {name: "read model p50 ms", decimals: 1},
	colLearnt99: {name: "p99 ms", decimals: 1},
}

// shopWarmUp is how long a run uses its new processes and connections before it measures them.
const shopWarmUp = time.Second

// composition is a shop with some of its layers and processes.
type composition struct {
	name  string
	path  string   // of a program with all roles in one process; "" for the processes of roles
	roles []string // the api first
	flags []string
	// silent says that there is no read model that hears of anything.
	silent bool
	// told is what clients were answered in all runs.
	told shop.Answers
}

func shops() []*composition {
	all := []string{"api", "relay", "consumer", "sweeper"}
	return []*composition{
		{name: wholeShop, roles: all},
		{name: "without limits", roles: all, flags: []string{"-without=limits"}},
		{name: "without keys", roles: all, flags: []string{"-without=keys"}},
		{name: "without messages", roles: all, flags: []string{"-without=messages"}, silent: true},
		{name: "without any of these", roles: all, flags: []string{"-without=limits,keys,messages"}, silent: true},
		{name: "all layers, only the api runs", roles: []string{"api"}, silent: true},
		{name: "all layers, Redis Streams", roles: all, flags: []string{"-broker=redis"}},
	}
}

// benchShop has clients hold seats in examples/reservation over HTTP: in the whole shop, and with layers or
// processes left out. Each sends its next request when it has an answer. A rate is that of clients who got
// their seat or learnt that it is taken. Clients, processes and servers share the machine. A seat that is
// sold twice fails the benchmark.
func benchShop(clients int) func(context.Context, *bench) {
	return func(ctx context.Context, b *bench) {
		r := b.compareShops(ctx, fmt.Sprintf("shop, clients: %d", clients), shops(), clients, wholeShop)
		b.atMost(0, r.column(wholeShop, colErrors), fmt.Sprintf("errors of the shop with %s, clients: %d", wholeShop, clients))
	}
}

// compareShops measures shops and prints what clients were answered.
func (b *bench) compareShops(ctx context.Context, title string, all []*composition, clients int, yardsticks ...string) results {
	b.openShops(ctx)
	t := table{title: title, columns: shopColumns, yardsticks: yardsticks}
	for _, s := range all {
		s.told = shop.Answers{}
		t.contenders = append(t.contenders, contender{s.name, func(ctx context.Context, length time.Duration) sample {
			if length < b.length { // each run warms up the processes it starts
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
	}
	check(err)
	return r
}

// openShops starts the servers of shops when they are first asked for.
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

// run starts a shop on servers without data, and ends it.
func (s *composition) run(ctx context.Context, b *bench, clients int, length time.Duration) (_ sample, err error) {
	data, err := b.shops.NewData(ctx)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, data.Drop()) }()
	var all shop.Roles
	defer func() { err = errors.Join(err, all.Stop()) }()
	seats := shop.EnoughSeats(shopWarmUp + length)
	if s.path != "" {
		seats *= bareFaster
		process := shop.New(s.name, data.Servers.Env(), s.flags...)
		if err := process.Start(s.path); err != nil {
			return nil, err
		}
		all = append(all, process)
		if err := process.AwaitListening(testenv.Patience); err != nil {
			return nil, fmt.Errorf("%w:\n%s", err, process.Log())
		}
	}
	for _, role := range s.roles {
		process, err := data.Start(role, append(s.flags, "-time-limit=15m")...) // it ends by itself where nobody ends it
		if err != nil {
			return nil, err
		}
		all = append(all, process)
	}
	hall, err := shop.OpenHall(ctx, all[0].URL(), clients, seats)
	if err != nil {
		return nil, err
	}
	defer hall.Close()
	return b.measureShop(ctx, hall, data, clients, length, s.silent, s.told), nil
}

// measureShop warms a shop up, has clients hold seats, and adds what they were answered to total. silent says that there
// is no read model that hears of it.
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
