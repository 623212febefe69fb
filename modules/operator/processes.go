package operator

import (
	"cmp"
	"context"
	"encoding/json"
	"slices"
	"strings"
	"time"
	"unicode"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/inbox/driver"
)

// Process is one process of a service, as it last reported itself. Package history reports.
type Process struct {
	// ID is unique for each start of a process.
	ID uuid.UUID
	// Beat is the number of the report, higher each time. A report that arrives twice counts once.
	Beat int64
	// Host, PID and Version are the name of the host, the process id, and the version of the program.
	Host    string
	PID     int
	Version string
	// Roles are the parts that run in it, such as "relay outbox".
	Roles []string
	// Since is when it started, and Seen when it last reported, by the clock of the host that reads. Add ignores Seen.
	Since, Seen time.Time
	// InWork is the number of messages in work. Slowest are the oldest ten of them, the oldest first.
	InWork  int
	Slowest []driver.Running
}

const (
	// forgottenAfter is how long a process is kept that reports no more.
	forgottenAfter = 10 * time.Minute
	// keptAfter is how long its last Beat is known, so that a report that is sent again does not count twice.
	keptAfter = 24 * time.Hour
	// leftBefore is the age of the last report of a process that has left, so that it is not listed.
	leftBefore = 2 * forgottenAfter

	maxSlowest   = 10
	maxProcesses = 1000 // listed at once
	maxStored    = 100  // characters of a text of a Process
	maxOfProcess = 100  // roles of a Process
)

// bounded returns a copy of p without its excess.
func (p Process) bounded() Process {
	p.Host, p.Version = stored(p.Host), stored(p.Version)
	p.Roles = slices.Clone(p.Roles[:min(len(p.Roles), maxOfProcess)])
	for i := range p.Roles {
		p.Roles[i] = stored(p.Roles[i])
	}
	p.Slowest = slices.Clone(p.Slowest[:min(len(p.Slowest), maxSlowest)])
	for i := range p.Slowest {
		r := &p.Slowest[i]
		r.Consumer, r.Name, r.Key = stored(r.Consumer), stored(r.Name), stored(r.Key)
	}
	return p
}

// stored returns the text that the table of processes can hold.
func stored(text string) string {
	kept := []rune(strings.Map(func(r rune) rune {
		if unicode.IsControl(r) {
			return ' '
		}
		return r
	}, strings.ToValidUTF8(text, "\uFFFD")))
	return string(kept[:min(len(kept), maxStored)])
}

// report stores what a process reports, unless it has arrived before.
func (h *MemoryHistory) report(p Process, now time.Time) (fresh bool) {
	if h.processes == nil {
		h.processes = map[uuid.UUID]Process{}
	}
	for id, known := range h.processes {
		if now.Sub(known.Seen) > keptAfter {
			delete(h.processes, id)
		}
	}
	if known, ok := h.processes[p.ID]; ok && known.Beat >= p.Beat {
		return false
	}
	p = p.bounded()
	p.Seen = now
	h.processes[p.ID] = p
	return true
}

// Processes implements History.
func (h *MemoryHistory) Processes(context.Context) ([]Process, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	var all []Process
	for _, p := range h.processes {
		if time.Since(p.Seen) <= forgottenAfter {
			all = append(all, p)
		}
	}
	slices.SortFunc(all, func(a, b Process) int { return b.Seen.Compare(a.Seen) })
	all = all[:min(len(all), maxProcesses)]
	slices.SortFunc(all, func(a, b Process) int { return cmp.Or(a.Since.Compare(b.Since), slices.Compare(a.ID[:], b.ID[:])) })
	return all, nil
}

// Leave implements History.
func (h *MemoryHistory) Leave(_ context.Context, id uuid.UUID) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if p, ok := h.processes[id]; ok {
		p.Seen = time.Now().Add(-leftBefore)
		h.processes[id] = p
	}
	return nil
}

const processTable = "holdfast_process"

// storedRunning is a message in work in the table. Times are in seconds before and after the report, so that the clocks of the
// processes need not agree.
type storedRunning struct {
	Consumer string    `json:"consumer"`
	ID       uuid.UUID `json:"id"`
	Name     string    `json:"name"`
	Key      string    `json:"key,omitempty"`
	Attempt  int       `json:"attempt"`
	Age      float64   `json:"age"`
	Left     float64   `json:"left"`
}

// packed returns the slowest messages for the table.
func packed(all []driver.Running, now time.Time) ([]byte, error) {
	rows := make([]storedRunning, len(all))
	for i, r := range all {
		rows[i] = storedRunning{r.Consumer, r.ID, r.Name, r.Key, r.Attempt, now.Sub(r.Since).Seconds(), r.Until.Sub(now).Seconds()}
	}
	return json.Marshal(rows)
}

func unpacked(text []byte, seen time.Time) ([]driver.Running, error) {
	var rows []storedRunning
	err := json.Unmarshal(text, &rows)
	all := make([]driver.Running, len(rows))
	for i, r := range rows {
		all[i] = driver.Running{
			Consumer: r.Consumer, ID: r.ID, Name: r.Name, Key: r.Key, Attempt: r.Attempt, Since: seen.Add(-lasting(r.Age)), Until: seen.Add(lasting(r.Left)),
		}
	}
	return all, err
}

// lasting returns a number of seconds as a duration.
func lasting(seconds float64) time.Duration { return time.Duration(seconds * float64(time.Second)) }

// Processes implements History.
func (h *PostgresHistory) Processes(ctx context.Context) (all []Process, err error) {
	err = h.within(ctx, "processes", func(ctx context.Context) error {
		rows, err := h.pool.Query(ctx, `SELECT id, beat, host, pid, version, roles, extract(epoch FROM now() - since)::float8,
			extract(epoch FROM now() - seen_at)::float8, in_work, slowest::text FROM (
				SELECT * FROM `+processTable+` WHERE seen_at >= now() - make_interval(secs => $2) ORDER BY seen_at DESC LIMIT $1) AS p ORDER BY since, id`,
			maxProcesses, forgottenAfter.Seconds())
		if err != nil {
			return err
		}
		now := time.Now()
		all, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (p Process, err error) {
			var age, silent float64
			var slowest string
			if err = row.Scan(&p.ID, &p.Beat, &p.Host, &p.PID, &p.Version, &p.Roles, &age, &silent, &p.InWork, &slowest); err != nil {
				return p, err
			}
			p.Since, p.Seen = now.Add(-lasting(age)), now.Add(-lasting(silent))
			p.Slowest, err = unpacked([]byte(slowest), p.Seen)
			return p, err
		})
		return err
	})
	return all, err
}

// Leave implements History.
func (h *PostgresHistory) Leave(ctx context.Context, id uuid.UUID) error {
	return h.within(ctx, "leave", func(ctx context.Context) error {
		_, err := h.pool.Exec(ctx, "UPDATE "+processTable+" SET seen_at = now() - make_interval(secs => $2) WHERE id = $1", id, leftBefore.Seconds())
		return err
	})
}
