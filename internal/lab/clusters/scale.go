package main

import (
	"context"
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/internal/lab/load"
	"github.com/holdfast-go/holdfast/internal/lab/shop"
	"github.com/holdfast-go/holdfast/internal/runloop"
)

const (
	// backlog is how many reservations fall due at once, and then how many messages wait.
	backlog = 5000
	// rounds is how often each number of processes is measured; the middle one counts.
	rounds = 3
	// clients hold seats at the same time, for clientsLast.
	clients     = 32
	clientsLast = 5 * time.Second
)

// forget empties the tables of the shop.
const forget = "TRUNCATE reservations, reservation_states, seats, events, holdfast_outbox, holdfast_inbox"

// counts are the numbers of processes that are compared.
var counts = []int{1, 2, 4}

// stages are the roles in the order in which work goes through them: sweepers expire what is due and write messages,
// relays publish these, consumers take them.
var stages = []struct {
	role, unit string
	left       string // asks how much the stage has not done
}{
	{"sweeper", "reservations expired", "select count(*) from reservations where status = 'held'"},
	{"relay", "messages published", "select count(*) from holdfast_outbox"},
	{"consumer", "messages consumed", "select (select count(*) from reservations) - (select count(*) from reservation_states)"},
}

// api is the role that clients meet.
const apiRole, apiUnit = "api", "requests for a seat"

// rates are operations per second, by role and number of processes.
type rates map[string]map[int]float64

// measureScale measures each role alone, with the servers that the others have filled.
func measureScale(ctx context.Context, h *house) (rates, error) {
	samples := map[string]map[int][]float64{}
	for round := range rounds {
		for _, n := range counts {
			fmt.Fprintf(os.Stderr, "clusters: %d of each role, round %d\n", n, round+1)
			got, err := h.measureRound(ctx, n)
			if err != nil {
				return nil, err
			}
			for role, rate := range got {
				if samples[role] == nil {
					samples[role] = map[int][]float64{}
				}
				samples[role][n] = append(samples[role][n], rate)
			}
		}
	}
	middle := rates{}
	for role, byCount := range samples {
		middle[role] = map[int]float64{}
		for n, all := range byCount {
			slices.Sort(all)
			middle[role][n] = all[len(all)/2]
		}
	}
	return middle, nil
}

// measureRound measures n processes of each role.
func (h *house) measureRound(ctx context.Context, n int) (map[string]float64, error) {
	got := map[string]float64{}
	rate, err := h.measureAPI(ctx, n) // which makes the tables, too
	if err != nil {
		return nil, err
	}
	got[apiRole] = rate
	err = onPostgres(ctx, h.database(), forget, fmt.Sprintf(`INSERT INTO reservations (id, event_id, user_id, seats, status, expires_at)
			SELECT gen_random_uuid(), gen_random_uuid(), 'u', '{1}', 'held', now() FROM generate_series(1, %d)`, backlog), "VACUUM ANALYZE")
	if err != nil {
		return nil, err
	}
	for _, stage := range stages {
		if got[stage.role], err = h.drain(ctx, n, stage.role, stage.left); err != nil {
			return nil, fmt.Errorf("%d of %s: %w", n, stage.role, err)
		}
	}
	return got, onPostgres(ctx, h.database(), forget) // the audit knows nothing of these reservations
}

// start runs n processes of a role, spread over the hosts, and returns when they are ready.
func (h *house) start(ctx context.Context, n int, name string, flags ...string) (roles []*role, err error) {
	for i := range n {
		app := i % len(h.apps)
		r, err := startRole(h.apps[app], 9000+i, h.env(app), name, flags...)
		if err != nil {
			return roles, err
		}
		roles = append(roles, r)
	}
	return roles, eventually(ctx, func(ctx context.Context) error { return allReady(ctx, roles) })
}

// drain has n processes do what is left, and returns how much they did in a second, from the first progress on.
func (h *house) drain(ctx context.Context, n int, name, left string) (rate float64, err error) {
	conn, err := pgx.Connect(ctx, h.database())
	if err != nil {
		return 0, err
	}
	defer conn.Close(ctx)
	type progress struct {
		at   time.Time
		left int
	}
	look := func() (p progress, err error) {
		err = conn.QueryRow(ctx, left).Scan(&p.left)
		p.at = time.Now()
		return p, err
	}
	whole, err := look()
	if err != nil {
		return 0, err
	}
	started := make(chan error, 1)
	var roles []*role
	go func() {
		var err error
		roles, err = h.start(ctx, n, name, "-sweep=@every 1s")
		started <- err
	}()
	var first progress
	for deadline := time.Now().Add(patience); ; {
		now, err := look()
		if err != nil {
			return 0, err
		}
		if first.at.IsZero() && now.left < whole.left {
			first = now
		}
		if now.left == 0 {
			rate = float64(first.left) / now.at.Sub(first.at).Seconds()
			break
		}
		if now.at.After(deadline) {
			return 0, fmt.Errorf("%d are left", now.left)
		}
		if err := runloop.Sleep(ctx, 20*time.Millisecond); err != nil {
			return 0, err
		}
	}
	if err := <-started; err != nil {
		return 0, err
	}
	return rate, stopAll(roles)
}

// measureAPI has clients hold seats of many events through n api processes.
func (h *house) measureAPI(ctx context.Context, n int) (rate float64, err error) {
	roles, err := h.start(ctx, n, apiRole)
	if err != nil {
		return 0, err
	}
	var halls []*shop.Hall
	for _, r := range roles {
		hall, err := shop.OpenHall(ctx, r.url, clients, shop.EnoughSeats(clientsLast))
		if err != nil {
			return 0, err
		}
		defer hall.Close()
		halls = append(halls, hall)
	}
	l, err := load.Drive(ctx, clients, clientsLast, func(ctx context.Context, i int) error { return halls[i%n].Hold(ctx, i) })
	if err != nil {
		return 0, err
	}
	return l.Rate, stopAll(roles)
}
