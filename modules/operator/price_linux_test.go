package operator_test

import (
	"fmt"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sys/unix"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxtest"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/pgtest"
	"github.com/holdfast-go/holdfast/modules/operator"
	"github.com/holdfast-go/holdfast/modules/operator/internal/core"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
)

// A service of three outboxes and five consumers that records every 10 s pays less than 1 % of a core, here and in Postgres
// together, and 5 MB of heap. A day in the tables takes less than 5 MB. It is not parallel, because it counts the CPU time of the process.
func TestHistory_price(t *testing.T) {
	testenv.Nightly(t, "it measures CPU time")
	const reports, most, mostBytes = 500, 0.01, 5 << 20
	pool, _ := pgtest.NewSchema(t)
	h := must(operator.NewPostgresHistory(pool))(t)
	check(t, h.Migrate(t.Context()))
	service := operator.Config{History: h}
	for n := range 3 {
		store := must(outboxpgx.New(pool, outboxpgx.Config{Table: fmt.Sprint("outbox_", n)}))(t)
		check(t, store.Migrate(t.Context()))
		service.Outboxes = append(service.Outboxes, operator.Outbox{Name: fmt.Sprint("outbox-", n), Store: store})
	}
	for n := range 5 {
		name := fmt.Sprint("consumer-", n)
		consumer := must(inboxtest.NewConsumer(inboxtest.NewBroker(), inboxtest.Queue{Name: name}, inbox.NewMux(), inbox.ConsumerConfig{Logger: quiet}))(t)
		service.Consumers = append(service.Consumers, operator.Consumer{Name: name, Consumer: consumer})
	}
	o := must(core.New(service))(t)
	self := operator.Process{ID: uuid.New(), Host: "host", Since: time.Now()}
	report := func() { // the work of a Recorder that also measures
		self.Beat++
		_, err := h.Add(t.Context(), self, o.Tally(t.Context(), &self))
		check(t, err)
		self.Beat++
		_, err = h.Add(t.Context(), self, o.Measure(t.Context()))
		check(t, err)
	}
	report()
	_, err := pool.Exec(t.Context(), `INSERT INTO holdfast_history (step, at, part, done, failed, retried, problems, waiting, retrying, dead, lag, asked)
		SELECT s.step, to_timestamp(floor(extract(epoch FROM now()) / s.step) * s.step) - make_interval(secs => s.step * n), part, 1000, 1, 1, 0, 1, 1, 1, 0.5, false
		FROM (VALUES (10, 360), (300, 288)) AS s(step, steps), generate_series(1, s.steps) AS n, (SELECT DISTINCT part FROM holdfast_history) AS parts`)
	check(t, err)
	heap, here, there := heapInUse(), ownTime(t), serverTime(t, pool)
	for range reports {
		report()
	}
	here, there = ownTime(t)-here, serverTime(t, pool)-there
	grown := heapInUse() - heap
	var stored int
	check(t, pool.QueryRow(t.Context(), "SELECT pg_total_relation_size('holdfast_history') + pg_total_relation_size('holdfast_process')").Scan(&stored))
	share := (here + there).Seconds() / (reports * core.HourStep.Seconds())
	t.Logf("a report: %v of CPU time here, %v in Postgres, %.3f %% of a core; heap %+d bytes; tables %d bytes", here/reports, there/reports, 100*share, grown, stored)
	if there == 0 {
		t.Error("the server has used no time: the test does not see its processes")
	}
	if share > most || grown > mostBytes || stored > mostBytes {
		t.Errorf("more than %.0f %% of a core, or %d bytes", 100*most, mostBytes)
	}
}

func heapInUse() int {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int(m.HeapAlloc)
}

// ownTime returns the CPU time of this process.
func ownTime(t *testing.T) time.Duration {
	t.Helper()
	var used unix.Rusage
	check(t, unix.Getrusage(unix.RUSAGE_SELF, &used))
	return time.Duration(used.Utime.Nano() + used.Stime.Nano())
}

// serverTime returns the CPU time of the backends of a pool's role and database, which are processes of this host.
func serverTime(t *testing.T, pool *pgxpool.Pool) (total time.Duration) {
	t.Helper()
	const tick = 10 * time.Millisecond // of /proc on Linux
	rows, err := pool.Query(t.Context(), "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND usename = current_user")
	check(t, err)
	pids := must(pgx.CollectRows(rows, pgx.RowTo[int]))(t)
	for _, pid := range pids {
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err != nil {
			continue // it has ended
		}
		_, after, _ := strings.Cut(string(text), ") ")
		var user, system int64
		fields := strings.Fields(after)
		if _, err := fmt.Sscan(fields[11]+" "+fields[12], &user, &system); err != nil {
			t.Fatal(err)
		}
		total += time.Duration(user+system) * tick
	}
	return total
}
