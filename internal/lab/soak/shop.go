package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"
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
	// holdTime is how long seats are held: many holds expire while the shop runs.
	holdTime = 10 * time.Second
	// brokerLog bounds the log of quorum queues. RabbitMQ keeps its content in memory, and starts a new file at 512 MiB by
	// default: its memory would grow for hours, like a leak.
	brokerLog = "raft.wal_max_size_bytes = 16777216"
	// samples is the number of samples, for any length.
	samples = 180
	// settledWithin is how long the shop may take to finish its work after the last request.
	settledWithin = 2 * time.Minute
	// askAgain: one in this many answers may be 503 at half of the capacity. At full capacity more are right, because a
	// rejected request does not lengthen the queue.
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
	full  shop.Answers // answers at full capacity
	seats seats
}

// soakShop measures the capacity of the shop, runs it at half of that, and judges the samples.
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
	limit := fmt.Sprintf("-time-limit=%v", k.length()+time.Hour) // they end by themselves if this command dies
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

// openHall opens a hall with so many seats that each is free again long before its next turn.
func (k *soaking) openHall(ctx context.Context) (err error) {
	k.hall, err = shop.OpenHall(ctx, k.roles[0].URL(), k.clients, shop.EnoughSeats(3*holdTime))
	return err
}

// capacity returns the maximum rate of answered requests, and their cost. It warms up for a fourth of the time first.
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

// priced returns the cost of a load.
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

// soak lets clients visit at an even pace, and samples.
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

// fromDue describes the waits of a load at a pace, and its missed operations.
func fromDue(l load.Load) string {
	text := fmt.Sprintf("p50 %v, p99 %v, from when each was due", l.Percentile(0.5).Round(time.Millisecond), l.Percentile(0.99).Round(time.Millisecond))
	if l.Missed > 0 {
		text += fmt.Sprintf("; %d had not started at the end", l.Missed)
	}
	return text
}

// prices compares the cost of a request at full capacity and at half of it.
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

// used returns the processor times so far of all processes and servers, in a fixed order.
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

// leftSQL counts the remaining work: the outbox keeps no published rows, and the read model shows the last change of each
// reservation.
const leftSQL = `SELECT (SELECT count(*) FROM holdfast_outbox) + (SELECT count(*) FROM reservations WHERE status = 'held')
	+ (SELECT count(*) FROM reservations r LEFT JOIN reservation_states s ON s.reservation_id = r.id WHERE s.status IS DISTINCT FROM r.status)`

// deadSQL counts the dead letters of the outbox, and the messages behind parked keys.
const deadSQL = `SELECT (SELECT count(*) FROM holdfast_outbox_dead) + (SELECT count(*) FROM holdfast_inbox_waiting)`

// audit waits until no work is left. It finds whether a reservation is lost, an answer is wrong or a message is a dead
// letter.
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

// answers finds whether any answer is an error, and whether few are 503.
func (r *report) answers(full, half shop.Answers) {
	r.note("Answers at the capacity: %v. At half of it: %v.", full, half)
	wrong := full.Errors() + half.Errors()
	r.find(wrong == 0, "%d answers are errors", wrong)
	r.find(half.Unavailable()*askAgain <= half.All(), "%d of %d answers at half of the capacity are 503: at most 1 in %d",
		half.Unavailable(), half.All(), askAgain)
}

const mib = 1 << 20

// askWithin bounds the answer to a probe: a busy machine answers late.
const askWithin = 30 * time.Second

// ask requests a page.
func ask(ctx context.Context, url string, read func(*http.Response) error) error {
	ctx, cancel := context.WithTimeout(ctx, askWithin)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s", req.URL.Path, resp.Status)
	}
	return read(resp)
}

// few is for small counts of a process: a leak of ten an hour shows in the last twenty minutes of half an hour, which are
// judged.
var few = kind{unit: fmt.Sprintf("least of %d", floorOf), slack: 3, floor: true}

// ofProcess are the sampled metrics of a process.
var ofProcess = []struct {
	metric, name string
	scale        float64
	kind
}{
	{"process_resident_memory_bytes", "resident memory", mib, kind{unit: "MiB", tolerance: 0.1, slack: 8}},
	{"go_memstats_heap_alloc_bytes", "Go heap", mib, kind{unit: "MiB", tolerance: 0.1, slack: 4}},
	{"go_goroutines", "goroutines", 1, few},
	{"process_open_fds", "open files", 1, few},
}

// processProbe reads /metrics of a role.
func processProbe(role *shop.Process) probe {
	return func(ctx context.Context, note func(string, kind, float64)) error {
		found := map[string]float64{}
		err := ask(ctx, role.URL()+"/metrics", func(resp *http.Response) error { return readMetrics(resp, found) })
		for _, m := range ofProcess {
			value, ok := found[m.metric]
			if err == nil && !ok {
				err = fmt.Errorf("%s has no metric %s", role.Name, m.metric)
			}
			note(role.Name+": "+m.name, m.kind, value/m.scale)
		}
		return err
	}
}

// readMetrics reads the metrics without labels from Prometheus text.
func readMetrics(resp *http.Response, into map[string]float64) error {
	lines := bufio.NewScanner(resp.Body)
	lines.Buffer(nil, mib)
	for lines.Scan() {
		name, text, ok := strings.Cut(lines.Text(), " ")
		if value, err := strconv.ParseFloat(text, 64); ok && err == nil && !strings.HasPrefix(name, "#") {
			into[name] = value
		}
	}
	return lines.Err()
}

// connectionsProbe counts the connections to Postgres by role.
func connectionsProbe(db *pgxpool.Pool, roles shop.Roles) probe {
	const sql = `SELECT count(*) FROM pg_stat_activity WHERE application_name = $1`
	return func(ctx context.Context, note func(string, kind, float64)) error {
		for _, role := range roles {
			var n float64
			if err := db.QueryRow(ctx, sql, role.Name).Scan(&n); err != nil {
				return err
			}
			note(role.Name+": connections to Postgres", few, n)
		}
		return nil
	}
}

// grows are the tables with a row for every request: the business's own, and entries that are kept for days.
var grows = map[string]bool{"reservations": true, "reservation_states": true, "holdfast_inbox": true, "holdfast_idempotency": true}

// tablesSQL returns every table with its size, its rows and its dead rows.
const tablesSQL = `
SELECT c.relname, pg_table_size(c.oid), pg_indexes_size(c.oid), greatest(s.n_live_tup, 0), s.n_dead_tup
FROM pg_class c JOIN pg_stat_user_tables s ON s.relid = c.oid WHERE c.relkind = 'r' ORDER BY c.relname`

// vacuumed is for how many seconds rows may be dead, or their space unused: autovacuum checks a table once a minute, and is
// late on a busy machine.
const vacuumed = 120

// churn is the space of a short-lived row in its table and indexes until vacuum.
const churn = 1 // KiB

// sizeSlack is how many KiB a table or its indexes may gain at a rate of requests. Two tables are known better: an outbox
// has the size of the rows that die between two rounds of autovacuum, a minute, and gains as much again if one round is a
// minute late. The rows of lanes are updated in place.
func sizeSlack(table string, rate float64) float64 {
	const minute, messages, lanes = 60, 0.3, 256 // messages: KiB of the two messages of a request
	switch table {
	case "holdfast_outbox":
		return minute * messages * rate
	case "holdfast_outbox_lanes":
		return lanes
	}
	return vacuumed * churn * rate
}

// leftover is for things that must not stay: a leak of 200 an hour shows in the last twenty minutes of half an hour, which
// are judged.
var leftover = kind{unit: fmt.Sprintf("least of %d", floorOf), slack: 50, floor: true}

// tablesProbe samples the tables of a shop at a rate of requests.
func tablesProbe(db *pgxpool.Pool, rate float64) probe {
	return func(ctx context.Context, note func(string, kind, float64)) error {
		rows, err := db.Query(ctx, tablesSQL)
		if err != nil {
			return err
		}
		defer rows.Close()
		for rows.Next() {
			var name string
			var table, indexes, live, dead float64
			if err := rows.Scan(&name, &table, &indexes, &live, &dead); err != nil {
				return err
			}
			noteTable(note, name, table, indexes, live, dead, rate)
		}
		return rows.Err()
	}
}

// noteTable records the size of a table that must keep its size, and the size per row of a table that grows by design.
func noteTable(note func(string, kind, float64), name string, table, indexes, live, dead, rate float64) {
	if !grows[name] {
		size := kind{unit: "KiB", tolerance: 0.1, slack: sizeSlack(name, rate)}
		note(name+": table", size, table/1024)
		note(name+": indexes", size, indexes/1024)
		if name != "holdfast_outbox" { // queuesProbe counts these exactly
			note(name+": rows", kind{tolerance: 0.1, slack: backlogSeconds * rate}, live)
		}
		note(name+": dead rows", kind{tolerance: 0.1, slack: vacuumed * rate}, dead)
		return
	}
	note(name+": rows", kind{grows: true}, live)
	note(name+": table, per row", kind{unit: "B", tolerance: 0.1, slack: 8}, table/max(live, 1))
	note(name+": indexes, per row", kind{unit: "B", tolerance: 0.15, slack: 8}, indexes/max(live, 1))
	note(name+": dead rows, per row", kind{tolerance: 0.1, slack: 0.25}, dead/max(live, 1))
}

// queuesSQL counts the waiting messages of the outbox, all its rows, and overdue holds.
const queuesSQL = `SELECT (` + waitingSQL + `), (SELECT count(*) FROM holdfast_outbox),
	(SELECT count(*) FROM reservations WHERE status = 'held' AND created_at < now() - $1::interval)`

// queuesProbe samples the waiting messages in the outbox and at the broker, and overdue holds. Its counts are exact.
func queuesProbe(db *pgxpool.Pool, adminURL string, hold time.Duration) probe {
	return func(ctx context.Context, note func(string, kind, float64)) error {
		var waits, rows, overdue float64
		if err := db.QueryRow(ctx, queuesSQL, hold).Scan(&waits, &rows, &overdue); err != nil {
			return err
		}
		note("outbox: messages that wait", leftover, waits)
		note("outbox: rows", leftover, rows)
		note("holds that are overdue", leftover, overdue)
		var queues []struct{ Messages float64 }
		err := testenv.Admin(ctx, adminURL, http.MethodGet, "/api/queues", nil, &queues)
		total := 0.0
		for _, q := range queues {
			total += q.Messages
		}
		note("RabbitMQ: messages in queues", leftover, total)
		return err
	}
}

// seats has the observations of held seats.
type seats struct{ looks, held, twice int }

// This index scan over held seats is cheap, and holds last longer than the time between two probes.
const seatsSQL = `SELECT count(*), count(*) - count(DISTINCT (event_id, seat))
	FROM (SELECT event_id, unnest(seats) AS seat FROM reservations WHERE status = 'held') AS held`

// probe looks for seats that two reservations hold at once. It is not a series: one is too many.
func (s *seats) probe(db *pgxpool.Pool) probe {
	return func(ctx context.Context, _ func(string, kind, float64)) error {
		var held, twice int
		if err := db.QueryRow(ctx, seatsSQL).Scan(&held, &twice); err != nil {
			return err
		}
		s.looks++
		s.held += held
		s.twice += twice
		return nil
	}
}

// judge finds whether a seat was held twice. It fails if no held seat was seen.
func (s *seats) judge(r *report) {
	r.find(s.twice == 0 && s.held > 0, "%d seats are held twice, in %d looks at the %d that are held then, one after the other", s.twice, s.looks, s.held)
}

// brokerProbe samples RabbitMQ's own figures.
func brokerProbe(adminURL string) probe {
	return func(ctx context.Context, note func(string, kind, float64)) error {
		var nodes []struct {
			Mem  float64 `json:"mem_used"`
			Proc float64 `json:"proc_used"`
		}
		err := testenv.Admin(ctx, adminURL, http.MethodGet, "/api/nodes", nil, &nodes)
		if err == nil && len(nodes) != 1 {
			err = fmt.Errorf("RabbitMQ has %d nodes", len(nodes))
		}
		if err != nil {
			return err
		}
		note("RabbitMQ: memory", kind{unit: "MiB", tolerance: 0.1, slack: 32}, nodes[0].Mem/mib)
		note("RabbitMQ: processes", kind{tolerance: 0.1, slack: 16}, nodes[0].Proc)
		return nil
	}
}

// redisProbe samples the memory of Redis, which has a key for every request of the last day.
func redisProbe(client *redis.Client) probe {
	return func(ctx context.Context, note func(string, kind, float64)) error {
		keys, err := client.DBSize(ctx).Result()
		if err != nil {
			return err
		}
		info, err := client.InfoMap(ctx, "memory", "clients").Result()
		if err != nil {
			return err
		}
		used, err := strconv.ParseFloat(info["Memory"]["used_memory"], 64)
		if err != nil {
			return err
		}
		clients, err := strconv.ParseFloat(info["Clients"]["connected_clients"], 64)
		note("Redis: keys", kind{grows: true}, float64(keys))
		note("Redis: memory, per key", kind{unit: "B", tolerance: 0.1, slack: 64}, used/float64(max(keys, 1)))
		note("Redis: clients", few, clients)
		return err
	}
}
