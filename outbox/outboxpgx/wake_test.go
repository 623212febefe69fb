package outboxpgx_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/runloop"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/pgtest"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
	"github.com/holdfast-go/holdfast/outbox/outboxtest"
)

// background runs the store's background work like a relay, until the test ends or stop is called.
func background(t *testing.T, store *outboxpgx.Store, wake func() bool) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() { defer close(ended); store.Background(ctx, wake) }()
	stop = func() { cancel(); <-ended }
	t.Cleanup(stop)
	return stop
}

// listens runs the background work of a relay that accepts every wake-up, and returns the wake-ups.
func listens(t *testing.T, store *outboxpgx.Store) signal {
	t.Helper()
	woken := make(signal, 1000)
	background(t, store, func() bool { _, _ = woken.Write(nil); return true })
	return woken
}

// hears waits for a wake-up after tell.
func (s signal) hears(t *testing.T, tell func()) {
	t.Helper()
	for len(s) > 0 { // a new connection causes a wake-up too
		<-s
	}
	tell()
	select {
	case <-s:
	case <-time.After(testenv.Patience):
		t.Fatal("not woken up")
	}
}

// signal is an io.Writer that signals every write.
type signal chan struct{}

func (s signal) Write(p []byte) (int, error) {
	select {
	case s <- struct{}{}:
	default:
	}
	return len(p), nil
}

// The writer and the relay have different Stores, like in different processes.
func TestWriteWakesTheRelayOfAnotherProcess(t *testing.T) {
	t.Parallel()
	f := setup(t, outboxpgx.Config{})
	elsewhere := fixtureOn(t, f.pool, outboxpgx.Config{})
	publisher := outboxtest.NewPublisher()
	relay := f.relay(t, publisher, outbox.RelayConfig{PollInterval: time.Hour})
	defer run(t, relay)()
	untilListening(t, f.store)
	for n := 1; n <= 20; n++ {
		elsewhere.write(t, outbox.Message{Name: "a", Body: []byte("1")})
		untilReceived(t, publisher, n)
	}
}

// A relay of the writer's process is woken first. Other processes are notified only if none of its relays polls.
func TestWake_prefersRelayOfSameProcess(t *testing.T) {
	t.Parallel()
	f := setup(t, outboxpgx.Config{})
	elsewhere := fixtureOn(t, f.pool, outboxpgx.Config{}).store
	far := listens(t, elsewhere)
	untilListening(t, elsewhere)
	var paused, near atomic.Int64
	background(t, f.store, func() bool { paused.Add(1); return false })
	untilListening(t, f.store)
	asked := paused.Load()
	far.hears(t, f.store.Wake)
	if paused.Load() == asked {
		t.Error("the relay of the process was not called")
	}
	background(t, f.store, func() bool { near.Add(1); return true })
	until(t, "not woken up at its beginning", func() bool { return near.Load() != 0 })
	began := near.Load()
	f.store.Wake()
	if near.Load() == began {
		t.Error("the polling relay of the process was not woken")
	}
	// Earlier notifications, or a new connection, may still wake them.
	testenv.Eventually(t, func() error {
		time.Sleep(50 * time.Millisecond)
		for len(far) > 0 {
			<-far
		}
		for range 10 {
			f.store.Wake()
		}
		time.Sleep(50 * time.Millisecond)
		if len(far) > 0 {
			return errors.New("other processes were notified although a relay of this process polls")
		}
		return nil
	})
}

// If several relays run on a Store, one listens, and another takes over from it. Relays of other outboxes are not
// woken.
func TestListeningIsTakenOver(t *testing.T) {
	t.Parallel()
	f := setup(t, outboxpgx.Config{})
	writer := fixtureOn(t, f.pool, outboxpgx.Config{}).store
	first := make(signal, 100)
	stop := background(t, f.store, func() bool { _, _ = first.Write(nil); return true })
	untilListening(t, f.store)
	woken := listens(t, f.store)
	first.hears(t, writer.Wake)
	stop()
	untilListening(t, f.store)
	woken.hears(t, writer.Wake)
	other := setup(t, outboxpgx.Config{})
	elsewhere := listens(t, other.store)
	untilListening(t, other.store)
	until(t, "the relay of another outbox is woken up, too", func() bool {
		for len(elsewhere) > 0 { // a new connection causes a wake-up too
			<-elsewhere
		}
		for range 3 {
			woken.hears(t, writer.Wake)
		}
		return len(elsewhere) == 0
	})
}

func TestSwallowedNotificationsAreReported(t *testing.T) {
	t.Parallel()
	f := setup(t, outboxpgx.Config{})
	wantFinding(t, f.store, "", "")
	swallowing := pgtest.Behind(t, f.pool.Config().ConnString(), pgx.QueryExecModeExec)
	warned := make(signal, 100)
	store, err := outboxpgx.New(swallowing, outboxpgx.Config{Logger: slog.New(slog.NewTextHandler(warned, nil))})
	must(t, err)
	wantFinding(t, store, "notifications do not arrive", "PollOnly")
	background(t, store, func() bool { return true })
	<-warned
	if store.Listening() == nil {
		t.Error("Hears is true without notifications")
	}
	silent, err := outboxpgx.New(swallowing, outboxpgx.Config{PollOnly: true})
	must(t, err)
	wantFinding(t, silent, "", "")
	early, err := outboxpgx.New(f.pool, outboxpgx.Config{Table: "not_there_yet"})
	must(t, err)
	if err := early.Check(t.Context()); err == nil || !strings.Contains(err.Error(), "Migrate") {
		t.Errorf("without a table: %v", err)
	}
	cancelled, cancel := context.WithCancel(t.Context())
	cancel()
	if err := f.store.Check(cancelled); !errors.Is(err, context.Canceled) {
		t.Errorf("a check that could not run returned %v", err)
	}
}

// Background wakes a relay when it starts. A write that is rolled back wakes none.
func TestRolledBackWritesWakeNobody(t *testing.T) {
	t.Parallel()
	f := setup(t, outboxpgx.Config{PollOnly: true})
	var woken atomic.Int64
	background(t, f.store, func() bool { woken.Add(1); return true })
	until(t, "not woken up at the beginning", func() bool { return woken.Load() != 0 })
	write := func(ctx context.Context, tx pgx.Tx) error {
		return f.store.Write(ctx, tx, outbox.Message{Name: "a", Body: []byte("1")})
	}
	refused := errors.New("refused")
	err := f.manager.Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error { return errors.Join(write(ctx, tx), refused) })
	if !errors.Is(err, refused) {
		t.Errorf("Do = %v", err)
	}
	must(t, f.manager.Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
		savepoint, err := tx.Begin(ctx)
		if err != nil {
			return err
		}
		return errors.Join(write(ctx, savepoint), savepoint.Rollback(ctx))
	}))
	if got := woken.Load(); got != 1 {
		t.Errorf("woken up %d times, want once, at the start", got)
	}
	f.write(t, outbox.Message{Name: "a", Body: []byte("1")})
	if got := woken.Load(); got != 2 {
		t.Errorf("woken up %d times by one commit", got-1)
	}
}

// A process that only writes has no goroutine of the outbox soon after its last commit, even if its pool is closed
// meanwhile. The test is not parallel, because other tests have such goroutines.
func TestWriterLeavesNothingRunning(t *testing.T) {
	pool := pgtest.New(t)
	var log bytes.Buffer
	own, err := pgxpool.New(t.Context(), pool.Config().ConnString())
	must(t, err)
	f := setupOn(t, own, outboxpgx.Config{Logger: slog.New(slog.NewTextHandler(&log, nil))})
	for range 100 {
		f.write(t, outbox.Message{Name: "a", Body: []byte("1")})
	}
	untilEnded(t)
	f.store.Wake()
	own.Close()
	f.store.Wake()
	untilEnded(t)
	if log.Len() > 0 {
		t.Errorf("after the pool is closed: %s", log.String())
	}
}

func untilEnded(t *testing.T) {
	t.Helper()
	testenv.Eventually(t, func() error {
		if stacks := ofOutbox(); stacks != "" {
			return fmt.Errorf("left running:\n%s", stacks)
		}
		return nil
	})
}

// ofOutbox returns the stacks of the outbox's goroutines.
func ofOutbox() string {
	stacks := make([]byte, 1<<20)
	stacks = stacks[:runtime.Stack(stacks, true)]
	var found []string
	for stack := range strings.SplitSeq(string(stacks), "\n\n") {
		if strings.Contains(stack, "pgnotify.") || strings.Contains(stack, "outboxpgx.(*Store)") || strings.Contains(stack, "pgprune.") {
			found = append(found, stack)
		}
	}
	return strings.Join(found, "\n\n")
}

// A Drain prunes like Run, and not at all if PruneInterval is negative.
func TestDrainPrunesUnlessItIsOff(t *testing.T) {
	t.Parallel()
	for interval, left := range map[time.Duration]int{0: 0, -1: 1} {
		f := setup(t, outboxpgx.Config{DedupRetention: time.Millisecond, PruneInterval: interval})
		must(t, f.manager.Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
			return second2(f.store.WriteOnce(ctx, tx, "once", outbox.Message{Name: "a", Body: []byte("1")}))
		}))
		must(t, runloop.Sleep(t.Context(), 5*time.Millisecond))
		drainAll(t, f.relay(t, outboxtest.NewPublisher(), outbox.RelayConfig{}))
		var keys int
		f.scan(t, `SELECT count(*) FROM holdfast_outbox_dedup`, &keys)
		if keys != left {
			t.Errorf("PruneInterval %v: %d keys after Drain, want %d", interval, keys, left)
		}
	}
}

func second2[A, B any](_ A, _ B, err error) error { return err }

func TestDedupKeysRunOut(t *testing.T) {
	t.Parallel()
	f := setup(t, outboxpgx.Config{})
	short, err := outboxpgx.New(f.pool, outboxpgx.Config{DedupRetention: time.Millisecond})
	must(t, err)
	once := func(w *outboxpgx.Store, key string) (first bool) {
		t.Helper()
		must(t, f.manager.Do(t.Context(), func(ctx context.Context, tx pgx.Tx) (err error) {
			_, first, err = w.WriteOnce(ctx, tx, key, outbox.Message{Name: "a", Body: []byte("1")})
			return err
		}))
		return first
	}
	once(short, "taken over")
	once(short, "pruned")
	f.exec(t, `SELECT pg_sleep(0.002)`)
	if !once(f.store, "taken over") || once(f.store, "taken over") {
		t.Error("an expired key is not free, or was not stored again")
	}
	_, err = f.store.Prune(t.Context())
	must(t, err)
	rows, _ := f.pool.Query(t.Context(), `SELECT key FROM holdfast_outbox_dedup`) // CollectRows returns its error
	keys, err := pgx.CollectRows(rows, pgx.RowTo[string])
	must(t, err)
	if len(keys) != 1 || keys[0] != "taken over" {
		t.Errorf("keys after Prune: %v", keys)
	}
}
