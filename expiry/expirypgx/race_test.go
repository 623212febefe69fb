package expirypgx_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/expiry"
	"github.com/holdfast-go/holdfast/expiry/expirypgx"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/pgtest"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
	"github.com/holdfast-go/holdfast/txretry"
)

// Four sweepers race with clients that confirm and extend holds that are about to expire, and the sweepers are
// replaced constantly. Every hold must end in one state, with one event if it expired and none if it was confirmed.
func TestSweepersRaceWithConfirmAndExtend(t *testing.T) {
	t.Parallel()
	race{holds: 1_000, over: 2 * time.Second, tries: 400}.run(t)
}

func TestSweepersRaceAtSerializable(t *testing.T) {
	t.Parallel()
	race{holds: 300, over: 2 * time.Second, tries: 150, isolation: pgx.Serializable}.run(t)
}

func TestSweepersRace_manyHolds(t *testing.T) {
	testenv.Nightly(t, "100,000 holds")
	race{holds: 100_000, over: 30 * time.Second, tries: 30_000}.run(t)
}

// race is one race of sweepers and clients.
type race struct {
	holds     int
	over      time.Duration // period of the first deadlines
	tries     int           // minimum number of actions per client
	isolation pgx.TxIsoLevel
}

func (r race) run(t *testing.T) {
	t.Helper()
	const clients, sweepers = 4, 4
	b := withOutbox(t, pgtest.New(t))
	b.isolation = r.isolation
	b.exec(t, `INSERT INTO holds (id, status, expires_at)
		SELECT 'hold-' || n, 'held', clock_timestamp() + random() * $2::interval FROM generate_series(1, $1) n`, r.holds, r.over)

	begun := time.Now()
	ctx, cancel := context.WithCancel(t.Context())
	var sweeping sync.WaitGroup
	write := mustOutbox(t, b.pool)
	for range sweepers {
		sweeping.Go(func() { b.sweepInShifts(ctx, t, write) })
	}
	var confirmed, extended atomic.Int64
	var wg sync.WaitGroup
	for range clients {
		wg.Go(func() {
			for n := 0; n < r.tries || time.Since(begun) < r.over; n++ { // timing: how long the race lasts
				if n >= r.tries {
					time.Sleep(5 * time.Millisecond)
				}
				id := fmt.Sprint("hold-", 1+rand.IntN(r.holds))
				sql, count := confirmSQL, &confirmed
				if rand.IntN(2) == 0 {
					sql, count = extendSQL, &extended
				}
				tag, err := b.pool.Exec(t.Context(), sql, id)
				if err != nil {
					t.Error(err)
					return
				}
				count.Add(tag.RowsAffected())
			}
		})
	}
	wg.Wait()
	eventually(t, func() error { return b.heldAtMost(t, 0) })
	cancel()
	sweeping.Wait()
	b.audit(t, int64(r.holds), confirmed.Load(), extended.Load())
}

// The statements in the documentation.
const (
	confirmSQL = "UPDATE holds SET status = 'confirmed' WHERE id = $1 AND status = 'held' AND expires_at > now()"
	extendSQL  = "UPDATE holds SET expires_at = expires_at + interval '300 ms' WHERE id = $1 AND status = 'held' AND expires_at > now()"
)

// sweepInShifts runs sweepers that are stopped and replaced constantly.
func (b *backend) sweepInShifts(ctx context.Context, t *testing.T, write emit) {
	t.Helper()
	for ctx.Err() == nil {
		cfg := quiet()
		cfg.BatchSize = 50
		sw, err := expiry.NewSweeper(b.Store(t, write), cfg)
		if err != nil {
			t.Error(err)
			return
		}
		shift, end := context.WithTimeout(ctx, time.Duration(100+rand.IntN(400))*time.Millisecond) // timing: a sweeper ends at a random time
		if err := sw.Run(shift); err != nil {
			t.Error(err)
		}
		end()
	}
}

// audit compares the events with the states at the end.
func (b *backend) audit(t *testing.T, holds, confirmed, extended int64) {
	t.Helper()
	var wrong, early, events int64
	expired, sold := int64(b.count(t, "status = 'expired'")), int64(b.count(t, "status = 'confirmed'"))
	b.scan(t, &events, "SELECT count(*) FROM events")
	b.scan(t, &wrong, outOfStepSQL)
	b.scan(t, &early, "SELECT count(*) FROM events JOIN holds ON id = hold_id WHERE at < expires_at")
	if early != 0 {
		t.Errorf("%d holds expired before their deadline", early)
	}
	if wrong != 0 || events != expired || sold != confirmed || expired+sold != holds {
		t.Errorf("%d holds: %d expired with %d events, %d confirmed (clients count %d), %d with a wrong number of events",
			holds, expired, events, sold, confirmed, wrong)
	}
	if confirmed == 0 || extended == 0 || expired == 0 {
		t.Errorf("no race: %d confirmed, %d extended, %d expired", confirmed, extended, expired)
	}
}

// outOfStepSQL counts the rows whose state does not match their events.
const outOfStepSQL = `SELECT count(*) FROM holds LEFT JOIN (SELECT hold_id, count(*) n FROM events GROUP BY 1) e ON hold_id = id
	WHERE coalesce(n, 0) <> CASE status WHEN 'expired' THEN 1 ELSE 0 END`

// Sweepers survive a server that crashes and restarts during their work, and nothing is lost or done twice.
func TestSweepersSurviveARestart(t *testing.T) {
	t.Parallel()
	testenv.Nightly(t, "restarts a Postgres")
	const holds = 1000 // before each outage
	server := testenv.Private(t, testenv.Postgres)
	b := withOutbox(t, pgtest.Pool(t, server.URL(), 8))
	for range 2 {
		cfg := quiet()
		cfg.BatchSize, cfg.PollInterval = 20, time.Second
		sw := newSweeper(t, b.Store(t, mustOutbox(t, b.pool)), cfg)
		background(t, sw.Run)
	}
	for _, outage := range []func() error{server.Kill, server.Stop} {
		before := b.count(t, "status = 'expired'")
		eventually(t, func() error {
			_, err := b.pool.Exec(t.Context(), `INSERT INTO holds (id, status, expires_at)
				SELECT gen_random_uuid()::text, 'held', clock_timestamp() + random() * interval '3 s' FROM generate_series(1, $1) n`, holds)
			return err
		})
		eventually(t, func() error {
			if b.count(t, "status = 'expired'") <= before+holds/5 {
				return errors.New("the sweepers do not work")
			}
			return nil
		})
		must(t, errors.Join(outage(), server.Start(t.Context())))
		eventually(t, func() error { return b.pool.Ping(t.Context()) })
	}
	eventually(t, func() error { return b.heldAtMost(t, 0) })
	var wrong int
	if b.scan(t, &wrong, outOfStepSQL); wrong > 0 {
		t.Errorf("%d rows are out of step with their events", wrong)
	}
}

// The variables that turn this test binary into a sweeper that kills itself.
const (
	killURLVar  = "HOLDFAST_EXPIRY_KILL_URL"
	killStepVar = "HOLDFAST_EXPIRY_KILL_STEP"
)

// A step is one piece sent to the server, or one received from it. The server cannot notice any state of a sweep in
// between.
type steps struct {
	left  atomic.Int64 // steps before the kill; negative: never
	armed atomic.Bool
}

func (s *steps) take() {
	if s.armed.Load() && s.left.Add(-1) == 0 {
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		select {} // until the kill arrives
	}
}

type steppedConn struct {
	net.Conn
	steps *steps
}

func (c steppedConn) Write(p []byte) (int, error) {
	c.steps.take() // before sending
	n, err := c.Conn.Write(p)
	c.steps.take() // the server has received it, or will
	return n, err
}

func (c steppedConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if n > 0 {
		c.steps.take() // the server has finished it
	}
	return n, err
}

// sweepAndDie sweeps once. It kills itself at the step, unless the sweep ends before it.
func sweepAndDie(rawURL string, step int64) error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	cfg, err := pgxpool.ParseConfig(rawURL)
	if err != nil {
		return err
	}
	var s steps
	s.left.Store(step)
	dial := cfg.ConnConfig.DialFunc
	cfg.ConnConfig.DialFunc = pgconn.DialFunc(func(ctx context.Context, network, addr string) (net.Conn, error) {
		conn, err := dial(ctx, network, addr)
		return steppedConn{conn, &s}, err
	})
	cfg.MaxConns = 1
	pool, err := pgxpool.NewWithConfig(ctx, cfg)
	if err != nil {
		return err
	}
	defer pool.Close()
	manager, err := txretry.New(pool, txretry.Config{})
	if err != nil {
		return err
	}
	write, err := toOutbox(pool)
	if err != nil {
		return err
	}
	store, err := expirypgx.New(patient{manager}, "holds", expirypgx.Config{Emit: write})
	if err != nil {
		return err
	}
	sweeper, err := expiry.NewSweeper(store, expiry.SweeperConfig{BatchSize: 5, BatchTimeout: time.Minute})
	if err != nil {
		return err
	}
	if err := pool.Ping(ctx); err != nil {
		return err
	}
	s.armed.Store(true)
	_, err = sweeper.Sweep(ctx)
	return err
}

// child sweeps in a child process that is killed at the step. It reports whether it was killed.
func child(t *testing.T, rawURL string, step int) (killed bool) {
	t.Helper()
	self, err := os.Executable()
	must(t, err)
	runtime.LockOSThread() // a child with a parent death signal dies with the thread
	defer runtime.UnlockOSThread()
	cmd := exec.CommandContext(t.Context(), self)
	cmd.Env = append(os.Environ(), killURLVar+"="+rawURL, killStepVar+"="+strconv.Itoa(step))
	cmd.SysProcAttr = &syscall.SysProcAttr{}
	testenv.DieWithParent(cmd.SysProcAttr)
	out, err := cmd.CombinedOutput()
	var ended *exec.ExitError
	switch {
	case err == nil:
		return false
	case errors.As(err, &ended) && ended.Sys().(syscall.WaitStatus).Signal() == syscall.SIGKILL:
		return true
	}
	t.Fatalf("the child failed at step %d: %v\n%s", step, err, out)
	return false
}

// A sweeper is killed at every step of two batches of rows and their messages in the outbox, which travel with
// COMMIT. Each time a row and its event are both there or both missing. The next sweeper completes the work with one
// event per row.
func TestKillAtEveryStep(t *testing.T) {
	t.Parallel()
	const due, most = 8, 400
	rawURL := pgtest.URL(t)
	b := withOutbox(t, pgtest.Pool(t, rawURL, 4))
	outcomes := map[int]int{} // expired rows at the kill, to number of kills
	step := 1
	for killed := true; killed; step++ {
		if step > most {
			t.Fatalf("the sweep takes more than %d steps", most)
		}
		b.exec(t, "TRUNCATE holds, holdfast_outbox")
		b.fill(t, due)
		b.exec(t, "INSERT INTO holds (id, status, expires_at) VALUES ('sold', 'confirmed', now() - interval '1 hour'), ('early', 'held', now() + interval '1 hour')")
		killed = child(t, rawURL, step)
		eventually(t, func() error { // the server may still execute the last statement
			var open int
			err := b.pool.QueryRow(t.Context(), `SELECT count(*) FROM pg_locks WHERE relation = 'holds'::regclass AND pid <> pg_backend_pid()`).Scan(&open)
			if err == nil && open > 0 {
				err = errors.New("the killed transaction is still open")
			}
			return err
		})
		var wrong int
		if b.scan(t, &wrong, outOfStepSQL); wrong > 0 {
			t.Errorf("killed at step %d, %d rows are out of step with their events", step, wrong)
		}
		outcomes[b.count(t, "status = 'expired'")]++

		sweep(t, b.Store(t, mustOutbox(t, b.pool)), expiry.SweeperConfig{})
		if b.scan(t, &wrong, outOfStepSQL); wrong > 0 || b.count(t, "status = 'expired'") != due {
			t.Errorf("after step %d, %d rows are out of step with their events, %d have expired", step, wrong, b.count(t, "status = 'expired'"))
		}
		if b.State(t, "sold") != "confirmed" || b.State(t, "early") != "held" {
			t.Errorf("after step %d rows have changed that were not due", step)
		}
	}
	t.Logf("%d steps; killed with so many rows expired: %v", step-2, outcomes)
	if outcomes[0] == 0 || outcomes[5] == 0 || outcomes[8] < 2 {
		t.Errorf("not killed before, between and after the two batches: %v", outcomes)
	}
}

// withOutbox returns a backend whose events are the messages in an outbox, as in production.
func withOutbox(t *testing.T, pool *pgxpool.Pool) *backend {
	t.Helper()
	b := &backend{pool: pool}
	b.exec(t, schema)
	store, err := outboxpgx.New(pool, outboxpgx.Config{})
	must(t, err)
	must(t, store.Migrate(t.Context()))
	b.exec(t, "DROP TABLE events")
	b.exec(t, "CREATE VIEW events AS SELECT ordering_key AS hold_id, id AS event_id, created_at AS at FROM holdfast_outbox")
	return b
}

type emit = func(ctx context.Context, tx pgx.Tx, rows []expiry.Row) error

// toOutbox makes the writer of an outbox store a message for every row. The writer sends it together with COMMIT.
func toOutbox(pool *pgxpool.Pool) (emit, error) {
	writer, err := outboxpgx.New(pool, outboxpgx.Config{PollOnly: true})
	if err != nil {
		return nil, err
	}
	return expirypgx.Messages(writer.Write, func(row expiry.Row) (outbox.Message, error) {
		body, err := json.Marshal(map[string]string{"hold": row.ID})
		return outbox.Message{
			ID: expiry.EventID("hold.expired", row.ID, row.Deadline), Name: "hold.expired", Key: row.ID,
			Body: body, ContentType: "application/json",
		}, err
	}), nil
}

func mustOutbox(t *testing.T, pool *pgxpool.Pool) emit {
	t.Helper()
	write, err := toOutbox(pool)
	must(t, err)
	return write
}

// The events of the race and kill tests are messages in an outbox: with the id of the expiry, written in the batch's
// transaction.
func TestMessagesGoToTheOutbox(t *testing.T) {
	t.Parallel()
	b := withOutbox(t, pgtest.New(t))
	b.fill(t, 3)
	if r := sweep(t, b.Store(t, mustOutbox(t, b.pool)), expiry.SweeperConfig{BatchSize: 2}); r.Expired != 3 {
		t.Errorf("got %+v, want three rows", r)
	}
	rows, err := b.pool.Query(t.Context(), "SELECT h.id, h.expires_at, e.event_id::text FROM holds h JOIN events e ON e.hold_id = h.id")
	must(t, err)
	var row expiry.Row
	var event string
	n := 0
	_, err = pgx.ForEachRow(rows, []any{&row.ID, &row.Deadline, &event}, func() error {
		n++
		if want := expiry.EventID("hold.expired", row.ID, row.Deadline).String(); event != want {
			t.Errorf("the message of row %s has the id %s, want %s", row.ID, event, want)
		}
		return nil
	})
	if err != nil || n != 3 {
		t.Errorf("%d messages, %v, want three", n, err)
	}
}
