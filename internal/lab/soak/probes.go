package main

import (
	"bufio"
	"context"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/internal/lab/shop"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

const mib = 1 << 20

// askWithin bounds the answer to a probe: a busy machine answers late.
const askWithin = 30 * time.Second

// ask gets a page.
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

// few is how what a process has few of is judged: a leak of ten an hour shows in the twenty minutes that are judged of
// half an hour.
var few = kind{unit: fmt.Sprintf("least of %d", floorOf), slack: 3, floor: true}

// ofProcess are the metrics of a process that are sampled.
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

// readMetrics takes the metrics without labels from Prometheus text.
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

// grows are the tables that have a row for every request: the business's own, and entries that are kept for days.
var grows = map[string]bool{"reservations": true, "reservation_states": true, "holdfast_inbox": true, "holdfast_idempotency": true}

// tablesSQL returns every table with its size, its rows, and those of them that are dead.
const tablesSQL = `
SELECT c.relname, pg_table_size(c.oid), pg_indexes_size(c.oid), greatest(s.n_live_tup, 0), s.n_dead_tup
FROM pg_class c JOIN pg_stat_user_tables s ON s.relid = c.oid WHERE c.relkind = 'r' ORDER BY c.relname`

// vacuumed is for how many seconds rows may be dead, or their room unused: autovacuum looks at a table once a minute, and is late
// on a busy machine.
const vacuumed = 120

// churn is what a row that is there for a moment may take in its table and in its indexes until then.
const churn = 1 // KiB

// sizeSlack is how many KiB a table or its indexes may gain with so many requests a second. Two are known better:
// an outbox has the size of what dies between two rounds of autovacuum, a minute, and gains as much again when one round
// is a minute late; the rows of lanes are updated in place.
func sizeSlack(table string, rate float64) float64 {
	const minute, messages, lanes = 60, 0.3, 256 // messages are the KiB of the two of a request
	switch table {
	case "holdfast_outbox":
		return minute * messages * rate
	case "holdfast_outbox_lanes":
		return lanes
	}
	return vacuumed * churn * rate
}

// leftover is how what must not stay is judged: a leak of 200 an hour shows in the twenty minutes that are judged of
// half an hour.
var leftover = kind{unit: fmt.Sprintf("least of %d", floorOf), slack: 50, floor: true}

// tablesProbe samples the tables of a shop with so many requests a second.
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

// noteTable notes the size of a table that must stay as it is, and the size per row of one that grows by design.
func noteTable(note func(string, kind, float64), name string, table, indexes, live, dead, rate float64) {
	if !grows[name] {
		size := kind{unit: "KiB", tolerance: 0.1, slack: sizeSlack(name, rate)}
		note(name+": table", size, table/1024)
		note(name+": indexes", size, indexes/1024)
		if name != "holdfast_outbox" { // queuesProbe counts them, this is an estimate
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

// queuesSQL counts what waits in the outbox, all that is in it, and what should have expired.
const queuesSQL = `SELECT (` + waitingSQL + `), (SELECT count(*) FROM holdfast_outbox),
	(SELECT count(*) FROM reservations WHERE status = 'held' AND created_at < now() - $1::interval)`

// queuesProbe samples what waits in the outbox, at the broker and to expire. Its counts are exact.
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

// seats is what was seen of the seats that are held.
type seats struct{ looks, held, twice int }

// A look at the index of what is held is cheap, and holds last longer than it takes until the next look.
const seatsSQL = `SELECT count(*), count(*) - count(DISTINCT (event_id, seat))
	FROM (SELECT event_id, unnest(seats) AS seat FROM reservations WHERE status = 'held') AS held`

// probe looks for seats that two reservations hold at once. It is no series: one is too many.
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

// judge finds that no seat was held twice, where there were any to see.
func (s *seats) judge(r *report) {
	r.find(s.twice == 0 && s.held > 0, "%d seats are held twice, in %d looks at the %d that are held then, one after the other", s.twice, s.looks, s.held)
}

// brokerProbe samples what RabbitMQ says of itself.
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

// redisProbe samples the memory of Redis, which holds a key for every request of the last day.
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
