package outboxpgx_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/exec"
	ossignal "os/signal"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/pgtest"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
	"github.com/holdfast-go/holdfast/outbox/outboxtest"
)

func TestKilledBetweenPublishAndSettle(t *testing.T) {
	t.Parallel()
	f := setup(t, outboxpgx.Config{})
	f.store.Claims(driver.Lanes, 0)
	f.write(t, keyed(5, 10)...)
	publisher := outboxtest.NewPublisher()
	// A relay publishes a part of the claimed messages and is killed.
	batch, err := f.store.Claim(t.Context(), driver.Claim{Limit: 500, Lease: 500 * time.Millisecond})
	must(t, err)
	if len(batch.Messages) == 0 {
		t.Fatal("nothing claimed")
	}
	for _, m := range batch.Messages[:len(batch.Messages)/2] {
		publisher.Publish(t.Context(), m, func(error) {})
	}
	stop := run(t, f.relay(t, publisher, outbox.RelayConfig{PollInterval: 20 * time.Millisecond}))
	defer stop()
	f.untilEmpty(t, testenv.Patience)
	stop()
	if got := checkLedger(t, publisher.Received(), 5, 10); got != len(batch.Messages)/2 {
		t.Errorf("%d duplicates, want those published before the crash: %d", got, len(batch.Messages)/2)
	}
	if settled, err := f.store.Settle(t.Context(), batch, nil); err != nil || len(settled.Stale) != len(batch.Leases) {
		t.Errorf("the paused relay: %d of %d leases stale, %v", len(settled.Stale), len(batch.Leases), err)
	}
}

// The host of a relay vanishes in the middle of a claim, and the server gets no notice.
func TestVanishedHostFreesItsLanes(t *testing.T) {
	t.Parallel()
	f := setup(t, outboxpgx.Config{})
	f.write(t, keyed(5, 10)...)
	vanished, err := f.pool.Begin(t.Context())
	must(t, err)
	defer vanished.Rollback(context.WithoutCancel(t.Context()))
	_, err = vanished.Exec(t.Context(), outboxpgx.Statement("claim"), int64(7), int64(1_000_000), driver.Lanes, []string{}, 500, true, []int64{})
	must(t, err)
	publisher := outboxtest.NewPublisher()
	defer run(t, f.relay(t, publisher, outbox.RelayConfig{PollInterval: 50 * time.Millisecond}))()
	f.untilEmpty(t, testenv.Patience)
	checkLedger(t, publisher.Received(), 5, 10)
}

// After a failover or a clock adjustment, earlier times may lie in the future.
func TestClockSetBackHoldsNoFreeLane(t *testing.T) {
	t.Parallel()
	f := setup(t, outboxpgx.Config{})
	relay := f.relay(t, outboxtest.NewPublisher(), outbox.RelayConfig{})
	f.write(t, keyed(10, 1)...)
	drain(t, relay, 10)
	f.exec(t, `UPDATE holdfast_outbox_lanes SET lease_until = lease_until + interval '1 hour'`)
	f.write(t, keyed(10, 1)...)
	drain(t, relay, 10)
}

func TestPostgresRestart(t *testing.T) {
	t.Parallel()
	testenv.Nightly(t, "restarts and kills a Postgres")
	server := testenv.Private(t, testenv.Postgres)
	f := setupOn(t, pgtest.Pool(t, server.URL(), 10), outboxpgx.Config{})
	publisher := outboxtest.NewPublisher()
	publisher.Latency(5 * time.Millisecond)
	relay := f.relay(t, publisher, outbox.RelayConfig{
		BatchSize: 100, PollInterval: 50 * time.Millisecond, PublishTimeout: time.Second,
		LeaseTTL: 3 * time.Second, ShutdownTimeout: 5 * time.Second,
	})
	const keys, n = 50, 60
	parts := slices.Collect(slices.Chunk(keyed(keys, n), keys*n/2))
	stop := run(t, relay)
	defer stop()
	for i, fault := range []func() error{
		func() error { return server.Restart(t.Context()) },
		func() error { return errors.Join(server.Kill(), server.Start(t.Context())) },
	} {
		before := len(publisher.Received())
		testenv.Eventually(t, func() error {
			return f.manager.Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error { return f.store.Write(ctx, tx, parts[i]...) })
		})
		untilReceived(t, publisher, before+300)
		must(t, fault())
	}
	f.untilEmpty(t, testenv.Patience)
	stop()
	duplicates := checkLedger(t, publisher.Received(), keys, n)
	t.Logf("%d duplicates over two crashes", duplicates)
}

// Relays, pruning and writers work with one connection, slowly. None holds a connection while waiting for another.
func TestSmallPool(t *testing.T) {
	t.Parallel()
	for _, size := range []int32{1, 2} {
		t.Run(fmt.Sprint(size), func(t *testing.T) {
			t.Parallel()
			cfg := pgtest.New(t).Config()
			cfg.MaxConns = size
			pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
			must(t, err)
			t.Cleanup(pool.Close)
			f := setupOn(t, pool, outboxpgx.Config{Retention: time.Millisecond, PruneInterval: 10 * time.Millisecond})
			publisher := outboxtest.NewPublisher()
			stop := run(t, f.relay(t, publisher, outbox.RelayConfig{BatchSize: 5}), f.relay(t, publisher, outbox.RelayConfig{BatchSize: 5}))
			untilListening(t, f.store)
			for range 10 {
				f.write(t, keyed(5, 4)...)
			}
			untilReceived(t, publisher, 200)
			testenv.Eventually(t, func() error { return f.emptyNow(t) }) // published messages are pruned
			stop()
		})
	}
}

// The network between relays and Postgres fails in every way at random moments, including lost replies to COMMIT.
func TestNetworkFaults(t *testing.T) {
	t.Parallel()
	testenv.Nightly(t, "breaks the network for seconds")
	direct := pgtest.New(t)
	proxy := testenv.NewProxy(t, direct.Config().ConnString())
	f := setupOn(t, direct, outboxpgx.Config{})
	far, err := outboxpgx.New(pgtest.Pool(t, proxy.URL(), 10), outboxpgx.Config{})
	must(t, err)

	const keys, n = 40, 100
	f.write(t, keyed(keys, n)...)
	publisher := outboxtest.NewPublisher()
	publisher.Latency(2 * time.Millisecond)
	var relays []*outbox.Relay
	for range 2 {
		relay, err := outbox.NewRelay(far, publisher, outbox.RelayConfig{
			BatchSize: 40, PollInterval: 20 * time.Millisecond, PublishTimeout: 500 * time.Millisecond,
			LeaseTTL: time.Second, ShutdownTimeout: 2 * time.Second, Logger: quiet,
		})
		must(t, err)
		relays = append(relays, relay)
	}
	stop := run(t, relays...)
	defer stop()
	for _, outage := range []func(){proxy.DropReplies, proxy.Cut, proxy.Pause, proxy.DropReplies} {
		progress(t, publisher, 200, keys*n)
		proxy.CutConnections() // noticed or not
		progress(t, publisher, 200, keys*n)
		outage()
		until(t, "a relay has not noticed the outage", func() bool {
			return relays[0].Ready(t.Context()) != nil && relays[1].Ready(t.Context()) != nil
		})
		proxy.Heal()
	}
	f.untilEmpty(t, testenv.Patience)
	stop()
	t.Logf("%d duplicates", checkLedger(t, publisher.Received(), keys, n))
}

// erratic is a destination whose calls fail in every way at random. A call may also publish and then fail, or publish
// long after its context has ended.
type erratic struct {
	mu       sync.Mutex
	received []driver.Message
	calm     atomic.Bool
}

func (e *erratic) send(ctx context.Context, msgs []outbox.Message) []error {
	errs := make([]error, len(msgs))
	for i, m := range msgs {
		switch n := rand.IntN(400); {
		case e.calm.Load():
		case n < 4:
			panic("on purpose")
		case n < 8:
			runtime.Goexit()
		case n < 40:
			errs[i] = errOnPurpose
			continue
		case n < 60:
			errs[i] = errOnPurpose // after it was published
		case n < 62:
			return []error{&driver.PublishError{Class: driver.Unavailable, Err: errOnPurpose}}
		case n < 65:
			<-ctx.Done()
			time.Sleep(50 * time.Millisecond) // timing: the relay publishes it again meanwhile
		}
		e.mu.Lock()
		e.received = append(e.received, driver.Message{Key: m.Key, Body: m.Body})
		e.mu.Unlock()
	}
	return errs
}

// Relays run, and drain in small portions, beside each other and on one destination that fails at random. Nothing is
// lost, and each key is in order.
func TestRunBesideDrain(t *testing.T) {
	t.Parallel()
	const keys, n = 12, 25
	f := setup(t, outboxpgx.Config{})
	var e erratic
	publisher := &outbox.PublisherFunc{SendBatch: e.send, BatchSize: 5, Concurrency: 8}
	relay := func() *outbox.Relay {
		return f.relay(t, publisher, outbox.RelayConfig{
			BatchSize: 20, PollInterval: 50 * time.Millisecond, LeaseTTL: time.Second, PublishTimeout: 300 * time.Millisecond,
			ShutdownTimeout: 3 * time.Second, Retry: outbox.RetryPolicy{MaxAttempts: 1000, BaseDelay: 5 * time.Millisecond, MaxDelay: 20 * time.Millisecond},
		})
	}
	first, second := relay(), relay()
	defer run(t, first, second)()
	ctx, cancel := context.WithCancel(t.Context())
	var draining sync.WaitGroup
	for _, r := range []*outbox.Relay{first, relay()} {
		draining.Go(func() {
			for ctx.Err() == nil {
				if _, err := r.Drain(ctx, outbox.Bounds{Limit: 7}); err != nil && driver.ClassOf(err) != driver.Unavailable {
					t.Errorf("Drain: %v", err)
				}
			}
		})
	}
	for msgs := range slices.Chunk(keyed(keys, n), keys) {
		f.write(t, msgs...)
	}
	time.AfterFunc(5*time.Second, func() { e.calm.Store(true) }) // timing: if the faults last, the outbox is not empty in time
	f.untilEmpty(t, testenv.Patience)
	cancel()
	draining.Wait()
	until(t, "the relays are not ready", func() bool { return first.Ready(t.Context()) == nil && second.Ready(t.Context()) == nil })
	e.mu.Lock()
	defer e.mu.Unlock()
	t.Logf("%d duplicates", checkLedger(t, e.received, keys, n))
}

// progress waits until n more messages are received, or all.
func progress(t *testing.T, p *outboxtest.Publisher, n, all int) {
	t.Helper()
	untilReceived(t, p, min(len(p.Received())+n, all))
}

// A claim whose COMMIT took effect but whose reply was lost leases lanes without a holder. The next claim of the
// Store releases them, and no message becomes suspect.
func TestClaim_withLostReplyIsReleased(t *testing.T) {
	t.Parallel()
	direct := pgtest.New(t)
	proxy := testenv.NewProxy(t, direct.Config().ConnString())
	f := setupOn(t, direct, outboxpgx.Config{})
	far, err := outboxpgx.New(pgtest.Pool(t, proxy.URL(), 1), outboxpgx.Config{})
	must(t, err)
	far.Claims(driver.Lanes, 0)
	far.SlowClaims() // so that both claims send the same statement, which is prepared by then
	f.write(t, keyed(20, 2)...)
	req := driver.Claim{Limit: 500, Lease: time.Minute}
	whole, err := far.Claim(t.Context(), req)
	must(t, err)
	_, err = far.Settle(t.Context(), whole, nil)
	must(t, err)

	leased := func() (n int) {
		must(t, direct.QueryRow(t.Context(), `SELECT count(*) FROM holdfast_outbox_lanes WHERE token IS NOT NULL`).Scan(&n))
		return n
	}
	proxy.DropReplies()
	ctx, cancel := context.WithTimeout(t.Context(), testenv.Patience)
	defer cancel()
	go func() {
		for ctx.Err() == nil && leased() == 0 {
			time.Sleep(5 * time.Millisecond)
		}
		cancel()
	}()
	if b, err := far.Claim(ctx, req); err == nil {
		t.Fatalf("claimed %d messages without a reply", len(b.Messages))
	}
	proxy.Heal()
	if leased() == 0 {
		t.Fatal("the claim has not taken effect")
	}
	again, err := far.Claim(t.Context(), req)
	must(t, err)
	if len(again.Messages) != len(whole.Messages) || again.Suspect {
		t.Errorf("claimed %d, suspect %v, want all %d", len(again.Messages), again.Suspect, len(whole.Messages))
	}
}

// screen is a log that can be read while it is written.
type screen struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (s *screen) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.text.Write(p)
}

func (s *screen) count(text string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return strings.Count(s.text.String(), text)
}

// refuse makes Postgres refuse one kind of change of a table, like a server that is out of memory or disk.
func (f *fixture) refuse(t *testing.T, change, table, code string) (lift func()) {
	t.Helper()
	f.exec(t, `
		CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'run out' USING ERRCODE = '`+code+`'; END $$;
		CREATE TRIGGER refuse BEFORE `+change+` ON `+table+` FOR EACH ROW EXECUTE FUNCTION refuse()`)
	return func() {
		t.Helper()
		f.exec(t, `DROP FUNCTION refuse CASCADE`)
	}
}

// When Postgres runs out of memory or disk, no message becomes suspect, published messages are settled, and the log
// contains the error. When there is room again, everything continues.
func TestRelay_whenPostgresRunsOut(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ change, table, code string }{
		"disk, dead letters":  {"INSERT", "holdfast_outbox_dead", "53100"},
		"memory, claims":      {"UPDATE", "holdfast_outbox_lanes", "53200"},
		"disk, settlements":   {"DELETE", "holdfast_outbox", "53100"},
		"memory, settlements": {"DELETE", "holdfast_outbox", "53200"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if c.change == "DELETE" {
				testenv.Nightly(t, "a lane whose settlement failed rests for 30 s")
			}
			f := setup(t, outboxpgx.Config{})
			publisher := outboxtest.NewPublisher()
			publisher.Respond(func(m driver.Message) error {
				if m.Name == "bad" {
					return &driver.PublishError{Class: driver.Permanent, Err: errors.New("refused")}
				}
				return nil
			})
			log := &screen{}
			relay, err := outbox.NewRelay(f.store, publisher, outbox.RelayConfig{
				PollInterval: 50 * time.Millisecond, Logger: slog.New(slog.NewTextHandler(log, nil)),
			})
			must(t, err)
			lift := f.refuse(t, c.change, c.table, c.code)
			f.write(t, keyed(8, 2)...)
			f.write(t, outbox.Message{Name: "bad", Key: "bad", Body: []byte("1")})
			defer run(t, relay)()
			until(t, "the relay is ready, and its store is full", func() bool { return relay.Ready(t.Context()) != nil })
			until(t, "the log does not name the fault", func() bool { return log.count("run out") != 0 })
			lift()
			f.untilEmpty(t, testenv.Patience)
			letters, err := f.dead.List(t.Context(), outbox.Filter{})
			must(t, err)
			if len(letters) != 1 || letters[0].Class != string(driver.Permanent) || letters[0].Attempts != 1 {
				t.Errorf("dead letters %+v", letters)
			}
			testenv.Eventually(t, func() error { return relay.Ready(t.Context()) })
			checkLedger(t, publisher.Received(), 8, 2)
			if c.table == "holdfast_outbox_dead" && len(publisher.Received()) != 16 {
				t.Errorf("%d received, want each of 16 once", len(publisher.Received()))
			}
		})
	}
}

// These variables start a relay in a separate process: the test binary, started again with them.
const (
	crashURL    = "HOLDFAST_CRASH_POSTGRES_URL"
	crashLedger = "HOLDFAST_CRASH_LEDGER" // the file to which the relay publishes
)

const (
	poison    = `"poison"`
	crashCode = 137
)

// crashRelay runs until it is interrupted, or until it publishes the poison message.
func crashRelay() int {
	ctx, stop := ossignal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	pool, err := pgxpool.New(ctx, os.Getenv(crashURL))
	if err != nil {
		return 1
	}
	defer pool.Close()
	ledger, err := os.OpenFile(os.Getenv(crashLedger), os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		return 1
	}
	defer ledger.Close()
	store, err := outboxpgx.New(pool, outboxpgx.Config{})
	if err != nil {
		return 1
	}
	relay, err := outbox.NewRelay(store, deadly{ledger}, outbox.RelayConfig{
		LeaseTTL: 3 * time.Second, PublishTimeout: time.Second,
		ShutdownTimeout: 2 * time.Second, PollInterval: 20 * time.Millisecond, Logger: quiet,
	})
	if err != nil || relay.Run(ctx) != nil {
		return 1
	}
	return 0
}

// deadly publishes to a file, and ends the process at the poison message.
type deadly struct{ ledger *os.File }

func (d deadly) Publish(_ context.Context, m driver.Message, done func(error)) {
	if string(m.Body) == poison {
		os.Exit(crashCode)
	}
	_, err := fmt.Fprintf(d.ledger, "%s %s\n", m.Key, m.Body)
	done(err)
}

// One message ends every process that publishes it. The relays find it among the other messages of its lane, and
// publish everything else in order.
func TestPoisonIsQuarantined(t *testing.T) {
	t.Parallel()
	testenv.Nightly(t, "processes crash until the poison message is found")
	f := setup(t, outboxpgx.Config{})
	const keys, n = 20, 10
	msgs := keyed(keys, n)
	at := len(msgs) / 2
	f.write(t, msgs[:at]...)
	f.write(t, outbox.Message{Name: "bad", Key: "key-3", Body: []byte(poison)})
	f.write(t, msgs[at:]...)
	path := t.TempDir() + "/ledger"
	must(t, os.WriteFile(path, nil, 0o600))

	exe, err := os.Executable()
	must(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	crashes := make(chan int, 1)
	go func() {
		n := 0
		defer func() { crashes <- n }()
		for ctx.Err() == nil {
			cmd := exec.CommandContext(ctx, exe)
			cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGINT) }
			cmd.Env = append(os.Environ(), crashURL+"="+f.pool.Config().ConnString(), crashLedger+"="+path)
			switch _ = cmd.Run(); cmd.ProcessState.ExitCode() {
			case crashCode:
				n++
			case 1:
				t.Error("a relay could not run")
				return
			}
		}
	}()
	f.untilEmpty(t, testenv.Patience)
	cancel()
	got := <-crashes
	if got < 4 || got > 9 {
		t.Errorf("%d processes were lost", got)
	}
	t.Logf("%d processes were lost", got)

	letters, err := f.dead.List(t.Context(), outbox.Filter{Whole: true})
	must(t, err)
	if len(letters) != 1 || string(letters[0].Message.Body) != poison || letters[0].Class != string(driver.Quarantined) {
		t.Fatalf("dead letters %+v", letters)
	}
	ledger, err := os.ReadFile(path)
	must(t, err)
	var received []driver.Message
	for line := range strings.Lines(string(ledger)) {
		key, body, _ := strings.Cut(strings.TrimSuffix(line, "\n"), " ")
		received = append(received, driver.Message{Key: key, Body: []byte(body)})
	}
	checkLedger(t, received, keys, n)
}
