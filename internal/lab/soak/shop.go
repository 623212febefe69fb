package main

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/internal/lab/harness"
	"github.com/holdfast-go/holdfast/internal/lab/load"
	"github.com/holdfast-go/holdfast/internal/lab/shop"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

const (
	// holdTime is how long seats are held: so many expire while the shop runs.
	holdTime = 10 * time.Second
	// brokerLog bounds the log of quorum queues. RabbitMQ holds in memory what is in it, and begins a new file at 512 MiB
	// where nothing else is set: for hours its memory grows, and looks like a leak.
	brokerLog = "raft.wal_max_size_bytes = 16777216"
	// samples is how often all is sampled, whatever the length.
	samples = 180
	// settledWithin is how long the shop may take, after the last request, for all that was left to do.
	settledWithin = 2 * time.Minute
	// askAgain is one of how many answers may be 503 at half of the capacity. At the capacity more of them are right: who is
	// told to ask again does not lengthen the queue.
	askAgain = 1000
)

// soaking is a shop under load.
type soaking struct {
	sizes
	place *shop.Place
	data  *shop.Data
	db    *pgxpool.Pool
	redis *redis.Client
	roles shop.Roles
	hall  *shop.Hall
	full  shop.Answers // those at the capacity
	seats seats
}

// soakShop measures what the shop can do, runs it at half of that, and judges what was sampled meanwhile.
func soakShop(ctx context.Context, s sizes, r *report) (err error) {
	k := &soaking{sizes: s}
	defer func() { err = errors.Join(err, k.close()) }()
	if err := k.open(ctx); err != nil {
		return err
	}
	if err := k.openHall(ctx); err != nil {
		return err
	}
	full, fullCosts, err := k.capacity(ctx)
	if err != nil {
		return err
	}
	rate := full.Rate / 2
	r.note("%d clients who each wait for their answer reach %.0f requests a second for %.0f s: a hold, which one in four cancels and which expires after %v else. "+
		"The soak has half of that, for %v.", s.clients, full.Rate, s.secs, holdTime, s.length())
	m := newSampler(queuesProbe(k.db, k.place.RabbitMQ.AdminURL(), holdTime), k.seats.probe(k.db), tablesProbe(k.db, rate),
		connectionsProbe(k.db, k.roles), brokerProbe(k.place.RabbitMQ.AdminURL()), redisProbe(k.redis))
	for _, role := range k.roles {
		m.probes = append(m.probes, processProbe(role))
	}
	half, halfCosts, err := k.soak(ctx, m, rate)
	if err != nil {
		return err
	}
	r.note("%.0f requests a second were wanted and %.1f were answered; %s.", rate, half.Rate, fromDue(half))
	r.find(half.Rate >= keptPace*rate, "%.1f requests a second are answered: at least %.0f %% of the %.0f of the pace", half.Rate, 100*keptPace, rate)
	r.Tables = append(r.Tables, prices(full, half, fullCosts, halfCosts))
	if err := m.conclude(r); err != nil {
		return err
	}
	return k.audit(ctx, r)
}

func (k *soaking) open(ctx context.Context) (err error) {
	if k.place, err = shop.Open(ctx, brokerLog); err != nil {
		return err
	}
	if k.data, err = k.place.NewData(ctx); err != nil {
		return err
	}
	if k.db, err = pgxpool.New(ctx, k.data.Servers.Database); err != nil {
		return err
	}
	options, err := redis.ParseURL(k.data.Servers.Redis)
	if err != nil {
		return err
	}
	k.redis = redis.NewClient(options)
	limit := fmt.Sprintf("-time-limit=%v", k.length()+time.Hour) // they end by themselves where nobody ends them
	for _, name := range []string{"api", "relay", "consumer", "sweeper"} {
		role, err := k.data.Start(name, "-hold="+holdTime.String(), limit)
		if err != nil {
			return err
		}
		k.roles = append(k.roles, role)
	}
	return nil
}

func (k *soaking) close() error {
	if k.hall != nil {
		k.hall.Close()
	}
	err := k.roles.Stop()
	if k.redis != nil {
		err = errors.Join(err, k.redis.Close())
	}
	if k.db != nil {
		k.db.Close()
	}
	if k.data != nil {
		err = errors.Join(err, k.data.Drop())
	}
	if k.place != nil {
		err = errors.Join(err, k.place.Close())
	}
	return err
}

// openHall opens one with seats enough that one is free again long before its next turn.
func (k *soaking) openHall(ctx context.Context) (err error) {
	k.hall, err = shop.OpenHall(ctx, k.roles[0].URL(), k.clients, shop.EnoughSeats(3*holdTime))
	return err
}

// capacity returns how many requests a second the clients get answered, and what they cost. A fourth of the time before
// warms all up.
func (k *soaking) capacity(ctx context.Context) (l load.Load, costs []namedCost, err error) {
	if _, err := load.Drive(ctx, k.clients, k.stretch()/4, k.hall.Visit); err != nil {
		return l, nil, err
	}
	l, costs, err = k.priced(func() (load.Load, error) { return load.Drive(ctx, k.clients, k.stretch(), k.hall.Visit) })
	if err == nil && l.Rate < 1 {
		err = fmt.Errorf("the shop answers nothing: %v", k.hall.TakeAnswers())
	}
	k.full = k.hall.TakeAnswers()
	return l, costs, err
}

// priced says what a load costs.
func (k *soaking) priced(drive func() (load.Load, error)) (l load.Load, costs []namedCost, err error) {
	before, err := k.used()
	if err != nil {
		return l, nil, err
	}
	if l, err = drive(); err != nil {
		return l, nil, err
	}
	after, err := k.used()
	for i := range after {
		after[i].time -= before[i].time
	}
	return l, after, err
}

// soak has clients visit at an even pace, and samples.
func (k *soaking) soak(ctx context.Context, m *sampler, rate float64) (load.Load, []namedCost, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var sampling sync.WaitGroup
	sampling.Go(func() {
		if err := m.run(ctx, k.length()*99/100, samples); err != nil {
			cancel(err)
		}
	})
	l, costs, err := k.priced(func() (load.Load, error) { return load.DriveAt(ctx, k.clients, rate, k.length(), k.hall.Visit) })
	sampling.Wait()
	return l, costs, errors.Join(err, context.Cause(ctx))
}

// fromDue tells the waits of a load at a pace, and what it missed.
func fromDue(l load.Load) string {
	text := fmt.Sprintf("p50 %v, p99 %v, from when each was due", l.Percentile(0.5).Round(time.Millisecond), l.Percentile(0.99).Round(time.Millisecond))
	if l.Missed > 0 {
		text += fmt.Sprintf("; %d had not begun at the end", l.Missed)
	}
	return text
}

// prices are what a request costs at the capacity and at half of it.
func prices(full, half load.Load, fullCosts, halfCosts []namedCost) table {
	t := table{Title: "Processor time of a request, in µs", Columns: []string{"", "at the capacity", "at half of it"}}
	var all [2]time.Duration
	for i, c := range fullCosts {
		t.add(c.name, decimals(perOp(c.time, int64(full.Done)), 0), decimals(perOp(halfCosts[i].time, int64(half.Done)), 0))
		all[0], all[1] = all[0]+c.time, all[1]+halfCosts[i].time
	}
	t.add("together", decimals(perOp(all[0], int64(full.Done)), 0), decimals(perOp(all[1], int64(half.Done)), 0))
	return t
}

type namedCost struct {
	name string
	time time.Duration
}

// used are the processor times so far of all processes and servers, in one order.
func (k *soaking) used() (all []namedCost, err error) {
	for _, role := range k.roles {
		used, err := testenv.CPUTime(role.PID())
		if err != nil {
			return nil, err
		}
		all = append(all, namedCost{role.Name, used})
	}
	for _, s := range []*testenv.Server{k.place.Postgres, k.place.Redis, k.place.RabbitMQ} {
		used, err := s.CPUTime()
		if err != nil {
			return nil, err
		}
		all = append(all, namedCost{string(s.Kind()), used})
	}
	return all, nil
}

// leftSQL counts what is left to do: the outbox keeps no row of what is published, and the read model shows the last change
// of each reservation.
const leftSQL = `SELECT (SELECT count(*) FROM holdfast_outbox) + (SELECT count(*) FROM reservations WHERE status = 'held')
	+ (SELECT count(*) FROM reservations r LEFT JOIN reservation_states s ON s.reservation_id = r.id WHERE s.status IS DISTINCT FROM r.status)`

// deadSQL counts the dead letters of the outbox, and the messages whose keys are parked.
const deadSQL = `SELECT (SELECT count(*) FROM holdfast_outbox_dead) + (SELECT count(*) FROM holdfast_inbox_waiting)`

// audit waits until nothing is left to do, and finds that no reservation is lost, the answers are
// as they should be and nothing is a dead letter.
func (k *soaking) audit(ctx context.Context, r *report) error {
	var left, dead int
	for began := time.Now(); ; time.Sleep(100 * time.Millisecond) {
		if err := k.db.QueryRow(ctx, leftSQL).Scan(&left); err != nil {
			return err
		}
		if left == 0 || time.Since(began) > settledWithin {
			break
		}
	}
	half := k.hall.TakeAnswers()
	if _, err := k.data.Audit(ctx, k.full[shop.AnswerHeld]+half[shop.AnswerHeld]); err != nil {
		return err
	}
	if err := k.db.QueryRow(ctx, deadSQL).Scan(&dead); err != nil {
		return err
	}
	given, err := harness.DeadLetters(ctx, k.place.RabbitMQ.AdminURL())
	if err != nil {
		return err
	}
	r.answers(k.full, half)
	k.seats.judge(r)
	r.find(left == 0, "%d rows of the outbox, holds and rows of the read model are left to do %v after the last request", left, settledWithin)
	r.find(dead+given == 0, "%d messages are dead letters or wait behind one", dead+given)
	return nil
}

// answers finds that none is an error, and that few tell a client to ask again.
func (r *report) answers(full, half shop.Answers) {
	r.note("Answers at the capacity: %v. At half of it: %v.", full, half)
	wrong := full.Errors() + half.Errors()
	r.find(wrong == 0, "%d answers are errors", wrong)
	r.find(half.Unavailable()*askAgain <= half.All(), "%d of %d answers at half of the capacity are 503, which tells a client to ask again: at most 1 in %d",
		half.Unavailable(), half.All(), askAgain)
}
