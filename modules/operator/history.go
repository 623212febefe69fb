package operator

import (
	"cmp"
	"context"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

// History keeps the figures of a service for a day, for the charts of the page and the ages of problems, and knows the processes
// that run. Package history fills it. *PostgresHistory and *MemoryHistory implement it. Its methods are safe for concurrent use.
//
// It is two small tables, because a page that needs no other server works in an outage and in every installation. An existing
// Prometheus has longer and finer series, so the alerts and the dashboard use it; the page does not.
type History interface {
	// Add stores the report of a process: the process, and one figure of each part, which it adds to the current steps. It adds
	// up the counts of all processes, and replaces measured numbers. It reports whether a process has asked all these parts in the
	// current step of 10 s. It ignores a report whose Beat is not higher than the last one of its process.
	Add(ctx context.Context, from Process, figures []Figures) (asked bool, err error)
	// Processes returns the processes, the oldest first, at most 1,000. One that reports no more stays for 10 minutes.
	Processes(ctx context.Context) ([]Process, error)
	// Leave ends the listing of a process that ends. A report of it that arrives again is still ignored.
	Leave(ctx context.Context, id uuid.UUID) error
	// Read returns the last hour in steps of 10 s, or the last day in steps of 5 min, the oldest first.
	Read(ctx context.Context, day bool) ([]Figures, error)
}

// Figures are the numbers of one part in one step of time.
type Figures struct {
	// At is the start of the step, by the clock of the host that reads, to the minute. Add ignores it.
	At time.Time
	// Part is the name of an outbox, a consumer or a sweep.
	Part string
	// Done messages were published or processed in the step. Failed is the number of failed attempts, of which Retried are
	// repeated.
	Done, Failed, Retried int64
	// Problems is the largest number of problems that a process has found.
	Problems int
	// Measured reports whether the following numbers are known. They are those of the end of the step: messages that are ready or
	// waiting, parked or retrying, and dead, and the age of the oldest one.
	Measured                bool
	Waiting, Retrying, Dead int
	Lag                     time.Duration
	// Asked reports whether a process has asked the server for these numbers in the step. Read may leave it out.
	Asked bool
}

// steps are the lengths of steps, with the time for which each is kept.
var steps = []struct{ length, kept time.Duration }{{10 * time.Second, time.Hour}, {5 * time.Minute, 24 * time.Hour}}

// keptOf returns the place in steps of an hour or a day.
func keptOf(day bool) int {
	if day {
		return 1
	}
	return 0
}

// add adds the figures of one process to those of a step.
func (f *Figures) add(more Figures) {
	f.Done, f.Failed, f.Retried = f.Done+more.Done, f.Failed+more.Failed, f.Retried+more.Retried
	f.Problems, f.Asked = max(f.Problems, more.Problems), f.Asked || more.Asked
	if more.Measured {
		f.Measured, f.Waiting, f.Retrying, f.Dead, f.Lag = true, more.Waiting, more.Retrying, more.Dead, more.Lag
	}
}

// MemoryHistory keeps figures in memory, for a service on fakes. The zero value is empty.
type MemoryHistory struct {
	mu        sync.Mutex
	kept      [2]map[moment]*Figures
	processes map[uuid.UUID]Process
}

// moment is one step of one part.
type moment struct {
	at   time.Time
	part string
}

// Add implements History.
func (h *MemoryHistory) Add(_ context.Context, from Process, figures []Figures) (asked bool, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	now := time.Now()
	asked = true
	if !h.report(from, now) {
		return asked, nil
	}
	for i, s := range steps {
		if h.kept[i] == nil {
			h.kept[i] = map[moment]*Figures{}
		}
		for at := range h.kept[i] {
			if now.Sub(at.at) > s.kept {
				delete(h.kept[i], at)
			}
		}
		for _, f := range figures {
			f.At = now.UTC().Truncate(s.length)
			at := moment{f.At, f.Part}
			if known := h.kept[i][at]; known != nil {
				known.add(f)
			} else {
				h.kept[i][at] = &f
			}
			asked = asked && (i > 0 || h.kept[i][at].Asked)
		}
	}
	return asked, nil
}

// Read implements History.
func (h *MemoryHistory) Read(_ context.Context, day bool) ([]Figures, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	var all []Figures
	for _, f := range h.kept[keptOf(day)] {
		all = append(all, *f)
	}
	slices.SortFunc(all, func(a, b Figures) int { return cmp.Or(a.At.Compare(b.At), cmp.Compare(a.Part, b.Part)) })
	return all, nil
}

const historyTable = "holdfast_history"

//go:embed migrations/0008_*.sql
var historyFiles embed.FS

//go:embed migrations/0008_operator_history.sql
var createHistorySQL string

// PostgresHistory keeps figures in a table, at most some 650 rows for each part, and processes in another one. Each process that
// records writes its own row and two rows of each part every 10 s, in one statement. It is safe for concurrent use.
type PostgresHistory struct {
	pool   *pgxpool.Pool
	mu     sync.Mutex
	pruned time.Time // last
}

// NewPostgresHistory returns a history on the pool. Migrate creates its table.
func NewPostgresHistory(pool *pgxpool.Pool) (*PostgresHistory, error) {
	if pool == nil {
		return nil, errors.New("operator: the pool of the history is nil")
	}
	return &PostgresHistory{pool: pool}, nil
}

// Migrate creates the tables if there are none. Several processes may call it at once.
func (h *PostgresHistory) Migrate(ctx context.Context) error {
	return h.within(ctx, "migrate", func(ctx context.Context) error { return createTable(ctx, h.pool, processTable, createHistorySQL) })
}

// Schema returns the SQL file that Migrate applies, and the file that undoes it, as the packages of Holdfast do.
func (h *PostgresHistory) Schema() fs.FS { return migrationsIn(historyFiles) }

// Grants returns the privileges that a role needs to record and to read, as the packages of Holdfast do.
func (h *PostgresHistory) Grants(job string) []string {
	if !slices.Contains([]string{"relay", "consume", "sweep", "operate"}, job) {
		return nil
	}
	return []string{"SELECT, INSERT, UPDATE, DELETE ON " + historyTable, "SELECT, INSERT, UPDATE, DELETE ON " + processTable}
}

// Check returns the reason why figures cannot be kept, or nil.
func (h *PostgresHistory) Check(ctx context.Context) error {
	return h.within(ctx, "check", func(ctx context.Context) error {
		for _, table := range []string{historyTable, processTable} {
			_, err := h.pool.Exec(ctx, "SELECT FROM "+table+" LIMIT 1")
			if failed, ok := errors.AsType[*pgconn.PgError](err); ok && failed.Code == undefinedTable {
				return missingTable{table, "call PostgresHistory.Migrate, or the command setup"}
			}
			if err != nil {
				return err
			}
		}
		return nil
	})
}

// pruneEvery is the pause between two deletions of old figures by one process.
const pruneEvery = time.Minute

// Add implements History. The clock of the server decides about the steps.
func (h *PostgresHistory) Add(ctx context.Context, from Process, figures []Figures) (asked bool, err error) {
	columns := struct {
		parts                   []string
		done, failed, retried   []int64
		problems                []int
		asked                   []bool
		waiting, retrying, dead []*int
		lag                     []*float64
	}{}
	for _, f := range figures {
		columns.parts = append(columns.parts, f.Part)
		columns.done, columns.failed, columns.retried = append(columns.done, f.Done), append(columns.failed, f.Failed), append(columns.retried, f.Retried)
		columns.problems, columns.asked = append(columns.problems, f.Problems), append(columns.asked, f.Asked)
		var waiting, retrying, dead *int
		var lag *float64
		if f.Measured {
			seconds := f.Lag.Seconds()
			waiting, retrying, dead, lag = &f.Waiting, &f.Retrying, &f.Dead, &seconds
		}
		columns.waiting, columns.retrying, columns.dead = append(columns.waiting, waiting), append(columns.retrying, retrying), append(columns.dead, dead)
		columns.lag = append(columns.lag, lag)
	}
	from = from.bounded()
	now := time.Now()
	slowest, err := packed(from.Slowest, now)
	if err != nil {
		return false, fmt.Errorf("operator: history: add: %w", err)
	}
	roles := append([]string{}, from.Roles...) // not NULL
	err = h.within(ctx, "add", func(ctx context.Context) error {
		// All processes write the rows in the same order, so that they do not deadlock.
		err := h.pool.QueryRow(ctx, `
			WITH fresh AS (
				INSERT INTO `+processTable+` AS p (id, beat, host, pid, version, roles, since, seen_at, in_work, slowest)
				VALUES ($10, $11, $12, $13, $14, $15, now() - make_interval(secs => $16), now(), $17, $18::text::jsonb)
				ON CONFLICT (id) DO UPDATE SET beat = excluded.beat, roles = excluded.roles, seen_at = excluded.seen_at,
					in_work = excluded.in_work, slowest = excluded.slowest WHERE p.beat < excluded.beat
				RETURNING id),
			added AS (
				INSERT INTO `+historyTable+` AS h (step, at, part, done, failed, retried, problems, waiting, retrying, dead, lag, asked)
				SELECT s.step, to_timestamp(floor(extract(epoch FROM now()) / s.step) * s.step), f.part, f.done, f.failed, f.retried, f.problems,
					f.waiting, f.retrying, f.dead, f.lag, f.asked
				FROM unnest($1::text[], $2::bigint[], $3::bigint[], $4::bigint[], $5::int[], $6::int[], $7::int[], $8::int[], $9::float8[], $19::bool[])
					AS f(part, done, failed, retried, problems, waiting, retrying, dead, lag, asked), (VALUES (10), (300)) AS s(step)
				WHERE EXISTS (SELECT FROM fresh)
				ORDER BY s.step, f.part
				ON CONFLICT (step, at, part) DO UPDATE SET done = h.done + excluded.done, failed = h.failed + excluded.failed,
					retried = h.retried + excluded.retried, problems = greatest(h.problems, excluded.problems),
					waiting = coalesce(excluded.waiting, h.waiting), retrying = coalesce(excluded.retrying, h.retrying),
					dead = coalesce(excluded.dead, h.dead), lag = coalesce(excluded.lag, h.lag), asked = h.asked OR excluded.asked
				RETURNING step, asked)
			SELECT coalesce(bool_and(asked), true) FROM added WHERE step = 10`,
			columns.parts, columns.done, columns.failed, columns.retried, columns.problems, columns.waiting, columns.retrying, columns.dead, columns.lag,
			from.ID, from.Beat, from.Host, from.PID, from.Version, roles, max(0, now.Sub(from.Since).Seconds()), from.InWork, string(slowest), columns.asked).Scan(&asked)
		if err != nil || !h.duePrune() {
			return err
		}
		_, err = h.pool.Exec(ctx, "WITH gone AS (DELETE FROM "+processTable+" WHERE seen_at < now() - interval '1 day') "+ // a late report must not count twice
			"DELETE FROM "+historyTable+" WHERE step = 10 AND at < now() - interval '1 hour' OR step = 300 AND at < now() - interval '1 day'")
		return err
	})
	return asked, err
}

// duePrune reports whether this process should delete old figures now.
func (h *PostgresHistory) duePrune() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if time.Since(h.pruned) < pruneEvery {
		return false
	}
	h.pruned = time.Now()
	return true
}

// Read implements History.
func (h *PostgresHistory) Read(ctx context.Context, day bool) (figures []Figures, err error) {
	s := steps[keptOf(day)]
	err = h.within(ctx, "read", func(ctx context.Context) error {
		rows, err := h.pool.Query(ctx, `SELECT at, part, done, failed, retried, problems, waiting IS NOT NULL, coalesce(waiting, 0), coalesce(retrying, 0),
			coalesce(dead, 0), coalesce(lag, 0), now() FROM `+historyTable+` WHERE step = $1 AND at >= now() - make_interval(secs => $2) ORDER BY at, part`,
			int(s.length.Seconds()), s.kept.Seconds())
		if err != nil {
			return err
		}
		now := time.Now()
		figures, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (f Figures, err error) {
			var lag float64
			var read time.Time
			err = row.Scan(&f.At, &f.Part, &f.Done, &f.Failed, &f.Retried, &f.Problems, &f.Measured, &f.Waiting, &f.Retrying, &f.Dead, &lag, &read)
			f.At = f.At.Add(now.Sub(read).Round(time.Minute)) // a step stays within its minute
			f.Lag = time.Duration(lag * float64(time.Second))
			return f, err
		})
		return err
	})
	return figures, err
}

// historyTimeout bounds each statement of a PostgresHistory. It is shorter than a step.
const historyTimeout = 5 * time.Second

func (h *PostgresHistory) within(ctx context.Context, what string, do func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, historyTimeout)
	defer cancel()
	if err := do(ctx); err != nil {
		return fmt.Errorf("operator: history: %s: %w", what, err)
	}
	return nil
}
