// Package conformance has the suites that every processor, store of entries, ledger, parking, transport and
// consumer must pass, including implementations outside this module: TestProcessor, TestEntries, TestLedger,
// TestParking, TestSource and TestConsumer.
package conformance

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
)

// Runs selects the subtests of a suite that run on a backend.
type Runs struct {
	// Bubble runs each subtest in a testing/synctest bubble.
	Bubble bool
	// Nightly skips a subtest that does not run with every change, as testenv.Nightly does. Without it all
	// subtests run, which is for fakes.
	Nightly func(t testing.TB, why string)
	// Variant means that the suite runs on another backend of the same transport. Only the subtests that
	// depend on the kind of queue run with every change.
	Variant bool
}

// tier controls when a subtest runs on a server.
type tier int

const (
	always tier = iota // with every change, on each backend
	once               // with every change, on one backend of a transport
	fakes              // with every change on fakes; on servers at night, because it tests the engine or silent networks
)

// subtest is a test of a suite.
type subtest[F any] struct {
	tier tier
	test func(*testing.T, F)
}

// runAll runs the subtests, each with a fresh fixture.
func runAll[F any](t *testing.T, r Runs, fixture func(*testing.T) F, tests map[string]subtest[F]) {
	for name, s := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			switch {
			case r.Nightly == nil:
			case s.tier == fakes:
				r.Nightly(t, "fakes run it with every change")
			case s.tier == once && r.Variant:
				r.Nightly(t, "another kind of queue runs it with every change")
			}
			if r.Bubble {
				synctest.Test(t, func(t *testing.T) { s.test(t, fixture(t)) })
				return
			}
			s.test(t, fixture(t))
		})
	}
}

// patience bounds the wait for something that must happen. It detects hangs, as testenv.Patience does.
const patience = time.Minute

// await polls until check returns nil.
func await(t *testing.T, check func() error) {
	t.Helper()
	for deadline := time.Now().Add(patience); ; time.Sleep(20 * time.Millisecond) {
		err := check()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("still failing after %v: %v", patience, err)
		}
	}
}

func noError(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// OwnClass is a class with a dead-letter queue of its own in the sources of a fixture.
const OwnClass = "payment"

// SourceFixture is one empty queue. OwnClass has a dead-letter queue besides the usual classes.
type SourceFixture struct {
	// New returns another source of the queue, like that of another process.
	New func(t *testing.T) driver.Source
	// DeadLetters returns the dead letters of the queue's consumer.
	DeadLetters func(t *testing.T) driver.DeadLetters
	// Publish puts messages at the end of the queue, in this order, with all fields that a sender can set.
	Publish func(t *testing.T, msgs ...*inbox.Message)

	// Network carries the connections of the sources, and no others. Without it the tests of faults are
	// skipped.
	Network Network
	// Forgetful means that the queue may lose acknowledgements in transit when a session ends.
	Forgetful bool
	// Delete deletes the queue; declare creates it again, empty. Optional.
	Delete func(t *testing.T) (declare func())
	// Refuse makes the dead-letter queue of a class reject messages until fix is called: it is missing, full
	// or forbidden. Optional.
	Refuse func(t *testing.T, class string) (fix func())
	// Another returns the source of another consumer that gets the same messages. Optional.
	Another func(t *testing.T) driver.Source
	// NoRetrying means that the transport cannot list waiting messages: its source has no Retrying.
	NoRetrying bool
}

// Network breaks connections; testenv.Proxy of this module implements it. Its methods may be called from any
// goroutine.
type Network interface {
	// CutConnections ends all open connections; new ones can be opened.
	CutConnections()
	// Pause stops all traffic in both directions and keeps connections open.
	Pause()
	// DropReplies lets requests pass and drops replies.
	DropReplies()
	// Heal ends Pause and DropReplies.
	Heal()
}

// SourceBackend configures TestSource.
type SourceBackend struct {
	Runs
	// New returns a fresh fixture.
	New func(t *testing.T) SourceFixture
}

// TestSource tests the contract of driver.Source, Session, DeadLetters and Delayer.
func TestSource(t *testing.T, b SourceBackend) { runAll(t, b.Runs, b.New, sourceTests) }

var sourceTests = map[string]subtest[SourceFixture]{
	"envelope":                      {once, testSourceEnvelope},
	"window":                        {always, testSourceWindow},
	"receive ends with its context": {once, testSourceReceiveEnds},
	"random acknowledgements":       {once, testSourceAcks},
	"requeued":                      {always, testSourceGiveBack},
	"closed":                        {always, testSourceClose},
	"stale deliveries":              {once, testSourceStale},
	"stop under a flood":            {once, testSourceStop},
	"session changes owner":         {always, testSourceHandOver},
	"no queue":                      {once, testSourceMissing},
	"run and ready":                 {once, testSourceRun},
	"backlog":                       {always, testSourceBacklog},

	"moved to later":        {always, testMoveLater},
	"moved as it is":        {once, testMoveKeepsAll},
	"moved to the tail":     {once, testMoveTail},
	"moved to dead letters": {always, testMoveDead},
	"dead after retries":    {once, testDeadKeepsProgress},
	"destination rejects":   {once, testMoveRefused},
	"moved without Run":     {fakes, testMoveWithoutRun},
	"moved when stale":      {once, testMoveStale},
	"another consumer":      {once, testMoveForOneConsumer},

	"scan":              {once, testScan},
	"scan and return":   {once, testScanReturns},
	"scan ends":         {once, testScanEnds},
	"concurrent scans":  {once, testScansAtOnce},
	"scan in a scan":    {once, testScanInScan},
	"scans with faults": {once, testScanFaults},

	"waiting messages":                     {always, testRetrying},
	"waiting messages change":              {always, testRetryingChanges},
	"scan of waiting messages ends":        {once, testRetryingEnds},
	"waiting message becomes due":          {once, testRetryingDue},
	"waiting messages race":                {once, testRetryingRace},
	"waiting messages of another consumer": {once, testRetryingOfOneConsumer},

	"answers of calls are lost": {once, testSourceCalls(Network.DropReplies)},
	"calls are cut":             {fakes, testSourceCalls(Network.CutConnections)},
}

// running returns a source with a running Run until the test ends.
func running(t *testing.T, f SourceFixture) driver.Source {
	t.Helper()
	return run(t, f.New(t))
}

func run(t *testing.T, s driver.Source) driver.Source {
	t.Helper()
	ctx, stop := context.WithCancel(context.WithoutCancel(t.Context()))
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		s.Run(ctx)
	}()
	t.Cleanup(func() {
		stop()
		<-ended
	})
	await(t, func() error { return s.Ready(t.Context()) })
	return s
}

// begin opens a session of the source and starts it. It is closed when the test ends at the latest.
func begin(t *testing.T, s driver.Source, window int) driver.Session {
	t.Helper()
	session, err := s.Open(t.Context())
	noError(t, err)
	t.Cleanup(func() { _ = session.Close(context.WithoutCancel(t.Context())) }) // usually the test has closed it
	noError(t, session.Start(t.Context(), window))
	return session
}

// take receives n messages.
func take(t *testing.T, s driver.Session, n int) (all []driver.Delivery) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	for len(all) < n {
		ds, err := s.Receive(ctx, n-len(all))
		if err != nil {
			t.Fatalf("%d of %d messages, then %v", len(all), n, err)
		}
		if len(ds) > n-len(all) {
			t.Fatalf("%d messages although at most %d were requested", len(ds), n-len(all))
		}
		all = append(all, ds...)
	}
	return all
}

// quiet is how long the tests wait where no message may arrive.
const quiet = 100 * time.Millisecond

// wantNothing ends the test if a message arrives.
func wantNothing(t *testing.T, s driver.Session) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), quiet)
	defer cancel()
	ds, err := s.Receive(ctx, 1)
	if len(ds) != 0 || !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("%d messages too many, error %v", len(ds), err)
	}
}

func acked(t *testing.T, s driver.Session, ds ...driver.Delivery) {
	t.Helper()
	noError(t, s.Ack(t.Context(), ds, false))
}

// ended closes a session after everything written before has been read.
func ended(t *testing.T, s driver.Session) {
	t.Helper()
	noError(t, s.Stop(t.Context()))
	noError(t, s.Close(t.Context()))
}

// move moves messages like an engine: it acknowledges the originals unless the move has settled them.
func move(t *testing.T, source driver.Source, s driver.Session, moves ...driver.Move) []error {
	t.Helper()
	results := source.Move(t.Context(), moves)
	if len(results) != len(moves) {
		t.Fatalf("%d results of %d moves", len(results), len(moves))
	}
	var done []driver.Delivery
	for i, err := range results {
		if err == nil {
			done = append(done, moves[i].Delivery)
		}
	}
	if !source.Traits().MoveSettles && len(done) > 0 {
		acked(t, s, done...)
	}
	return results
}

func moved(t *testing.T, source driver.Source, s driver.Session, moves ...driver.Move) {
	t.Helper()
	noError(t, errors.Join(move(t, source, s, moves...)...))
}

// makeDead moves each message to the dead letters.
func makeDead(t *testing.T, source driver.Source, s driver.Session, class string, ds ...driver.Delivery) {
	t.Helper()
	moves := make([]driver.Move, len(ds))
	for i, d := range ds {
		failure := driver.Failure{Err: errors.New("broken"), Class: class}
		moves[i] = driver.Move{Delivery: d, Target: driver.ToDead, DeadLetter: driver.NewDeadLetter(d.Message(), failure, "suite", time.Now().Truncate(time.Millisecond))}
	}
	moved(t, source, s, moves...)
}

// numbered publishes messages with names that count from 1.
func numbered(t *testing.T, f SourceFixture, n int) (all []*inbox.Message) {
	t.Helper()
	for i := range n {
		all = append(all, named(fmt.Sprintf("m.%d", i+1)))
	}
	f.Publish(t, all...)
	return all
}

func names(ds []driver.Delivery) (all []string) {
	for _, d := range ds {
		all = append(all, d.Message().Name)
	}
	return all
}

func wantNames(t *testing.T, ds []driver.Delivery, want []*inbox.Message) {
	t.Helper()
	var all []string
	for _, m := range want {
		all = append(all, m.Name)
	}
	if got := names(ds); !slices.Equal(got, all) {
		t.Fatalf("messages %v, want %v", got, all)
	}
}

// calls has the calls of a session, and Move. A call that settles gets the first half of the messages in
// flight.
var calls = map[string]func(ctx context.Context, source driver.Source, s driver.Session, half []driver.Delivery) error{
	"Start": func(ctx context.Context, _ driver.Source, s driver.Session, _ []driver.Delivery) error {
		return errors.Join(s.Stop(ctx), s.Start(ctx, 5))
	},
	"Receive": func(ctx context.Context, _ driver.Source, s driver.Session, _ []driver.Delivery) error {
		short, cancel := context.WithTimeout(ctx, time.Second) // a source may retry on another connection
		defer cancel()
		_, err := s.Receive(short, 10)
		return err
	},
	"Ack": func(ctx context.Context, _ driver.Source, s driver.Session, half []driver.Delivery) error {
		return s.Ack(ctx, half, false)
	},
	"GiveBack": func(ctx context.Context, _ driver.Source, s driver.Session, half []driver.Delivery) error {
		return s.GiveBack(ctx, half)
	},
	"Stop": func(ctx context.Context, _ driver.Source, s driver.Session, _ []driver.Delivery) error {
		return s.Stop(ctx)
	},
	"Close": func(ctx context.Context, _ driver.Source, s driver.Session, _ []driver.Delivery) error {
		return s.Close(ctx)
	},
	"Move to later": func(ctx context.Context, source driver.Source, s driver.Session, half []driver.Delivery) error {
		return moveAll(ctx, source, s, half, func(d driver.Delivery) driver.Move { return later(d, 0, driver.Progress{Attempt: 2}) })
	},
	"Move to dead": func(ctx context.Context, source driver.Source, s driver.Session, half []driver.Delivery) error {
		return moveAll(ctx, source, s, half, func(d driver.Delivery) driver.Move {
			letter := driver.NewDeadLetter(d.Message(), driver.Failure{Class: OwnClass, Err: errBoom}, "suite", time.Now())
			return driver.Move{Delivery: d, Target: driver.ToDead, DeadLetter: letter}
		})
	},
}

// moveAll moves deliveries, and settles the originals of stored copies.
func moveAll(ctx context.Context, source driver.Source, s driver.Session, ds []driver.Delivery, to func(driver.Delivery) driver.Move) error {
	var moves []driver.Move
	for _, d := range ds {
		moves = append(moves, to(d))
	}
	results := source.Move(ctx, moves)
	for i, err := range results {
		if err == nil && !source.Traits().MoveSettles {
			results[i] = s.Ack(ctx, ds[i:i+1], false)
		}
	}
	return errors.Join(results...)
}

// testSourceCalls makes every call meet a fault. Messages outside the call are redelivered. Messages of the
// call are at the target of the call, or are redelivered.
func testSourceCalls(fault func(Network)) func(*testing.T, SourceFixture) {
	return func(t *testing.T, f SourceFixture) {
		if f.Network == nil {
			t.Skip("there is no network to break")
		}
		names := slices.Collect(maps.Keys(calls))
		if !f.New(t).Traits().Exclusive {
			faultyCalls(t, f, fault, names...)
			return
		}
		for _, name := range names { // only one session is served at a time
			t.Log(name)
			faultyCalls(t, f, fault, name)
		}
	}
}

// faultyCalls makes calls at the same time, each of a source of its own, while the network has a fault.
func faultyCalls(t *testing.T, f SourceFixture, fault func(Network), names ...string) {
	t.Helper()
	const n = 4
	missing := map[uuid.UUID]bool{}
	for _, m := range numbered(t, f, n*len(names)) {
		missing[m.ID] = true
	}
	sources, sessions, inHands := make([]driver.Source, len(names)), make([]driver.Session, len(names)), make([][]driver.Delivery, len(names))
	for i, name := range names {
		sources[i] = running(t, f)
		sessions[i], inHands[i] = inHand(t, sources[i], n)
		for _, d := range inHands[i][:n/2] {
			if name == "Ack" {
				delete(missing, d.Message().ID) // it may be gone
			}
		}
	}
	fault(f.Network)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	var all sync.WaitGroup
	errs := make([]error, len(names))
	for i, name := range names {
		all.Go(func() {
			errs[i] = calls[name](ctx, sources[i], sessions[i], inHands[i][:n/2])
			if ctx.Err() != nil {
				t.Errorf("%s does not return: %v", name, errs[i])
			}
		})
	}
	all.Wait()
	f.Network.CutConnections()
	f.Network.Heal()
	for _, s := range sessions {
		_ = s.Close(t.Context()) // it is lost
	}
	await(t, func() error {
		again := consumeUntil(t, sources[0], missing)
		for _, d := range scan(t, f, OwnClass) {
			delete(missing, d.Message.ID)
		}
		if len(missing) > 0 {
			return fmt.Errorf("%d messages are lost, the calls said %w, a session %w", len(missing), errors.Join(errs...), again)
		}
		return nil
	})
}

// inHand receives n messages; some may be copies of earlier ones.
func inHand(t *testing.T, source driver.Source, n int) (s driver.Session, ds []driver.Delivery) {
	t.Helper()
	await(t, func() error {
		session, err := source.Open(t.Context())
		if err != nil {
			return err
		}
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		defer cancel()
		ds = nil
		if err = session.Start(ctx, n); err == nil {
			for len(ds) < n && err == nil {
				var more []driver.Delivery
				more, err = session.Receive(ctx, n-len(ds))
				ds = append(ds, more...)
			}
		}
		if err != nil {
			_ = session.Close(t.Context()) // the next try starts again
			return err
		}
		s = session
		return nil
	})
	return s, ds
}

// consumeUntil acknowledges messages until none is missing or none arrives.
func consumeUntil(t *testing.T, source driver.Source, missing map[uuid.UUID]bool) error {
	t.Helper()
	s, err := source.Open(t.Context())
	if err != nil {
		return err
	}
	defer func() { _ = s.Close(context.WithoutCancel(t.Context())) }()
	if err := s.Start(t.Context(), 50); err != nil {
		return err
	}
	for len(missing) > 0 {
		ctx, cancel := context.WithTimeout(t.Context(), 2*quiet)
		ds, err := s.Receive(ctx, 50)
		cancel()
		if err != nil {
			return err
		}
		for _, d := range ds {
			delete(missing, d.Message().ID)
		}
		if err := s.Ack(t.Context(), ds, false); err != nil {
			return err
		}
	}
	return nil
}

// The backlog counts messages delivered to no consumer: new and requeued ones, and separately the ones that
// wait for their next attempt and the ones put off. Delivered messages are not counted.
func testSourceBacklog(t *testing.T, f SourceFixture) {
	source := running(t, f)
	measured, ok := source.(driver.Measured)
	if !ok {
		t.Fatal("the source does not count its messages")
	}
	wants := func(what string, fits func(driver.Backlog) bool) {
		t.Helper()
		await(t, func() error {
			got, err := measured.Backlog(t.Context())
			if err == nil && !fits(got) {
				err = fmt.Errorf("%s: the backlog is %+v", what, got)
			}
			return err
		})
	}
	wants("nothing sent", func(b driver.Backlog) bool { return b == driver.Backlog{} })
	numbered(t, f, 5)
	wants("5 sent", func(b driver.Backlog) bool { return b == driver.Backlog{Waiting: 5} })
	s := begin(t, source, 4)
	ds := take(t, s, 4)
	wants("4 taken", func(b driver.Backlog) bool { return b == driver.Backlog{Waiting: 1} })
	putOff := later(ds[3], time.Hour, driver.Progress{Attempt: 1})
	putOff.PutOff = true
	moved(t, source, s, later(ds[0], time.Hour, driver.Progress{Attempt: 2}), putOff)
	noError(t, s.Ack(t.Context(), ds[2:3], false))
	take(t, s, 1)
	// A broker with shorter steps redelivers the waiting message, and the session has room to send it on.
	receiving(t, s, func() {
		wants("2 moved, 1 done, the others taken", func(b driver.Backlog) bool { return b == driver.Backlog{Retrying: 1, PutOff: 1} })
	})
	noError(t, s.GiveBack(t.Context(), ds[1:2]))
	ended(t, s) // with one unsettled
	wants("given back", func(b driver.Backlog) bool {
		left := b.Waiting + b.Retrying + b.PutOff
		return b.Waiting >= 2 && (left == 4 || left == 5 && f.Forgetful)
	})
}

// receiving makes a session receive while do runs, because it sends on messages in transit. No message may
// arrive.
func receiving(t *testing.T, s driver.Session, do func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		if ds, err := s.Receive(ctx, 1); len(ds) != 0 || !errors.Is(err, context.Canceled) {
			t.Errorf("%d messages too many, error %v", len(ds), err)
		}
	}()
	defer func() {
		cancel()
		<-ended
	}()
	do()
}

// A dead letter keeps its message's record of attempts.
func testDeadKeepsProgress(t *testing.T, f SourceFixture) {
	first := time.Now().Add(-time.Hour).Truncate(time.Millisecond)
	source := running(t, f)
	s := begin(t, source, 10)
	f.Publish(t, full())
	take1(t, s, func(d driver.Delivery) {
		moved(t, source, s, later(d, 100*time.Millisecond, driver.Progress{Attempt: 4, Recovered: 2, FirstFailedAt: first}))
	})
	take1(t, s, func(d driver.Delivery) {
		moved(t, source, s, driver.Move{Delivery: d, Target: driver.ToDead, DeadLetter: inbox.DeadLetter{
			Message: *d.Message(), Class: OwnClass, Error: "broken", Attempts: 4, FirstFailedAt: first, FailedAt: first,
		}})
	})
	await(t, func() error {
		letters := scan(t, f, OwnClass)
		if len(letters) != 1 || letters[0].Message.Attempt != 4 || letters[0].Message.Recovered != 2 || !letters[0].Message.FirstFailedAt.Equal(first) {
			return fmt.Errorf("dead letters %+v", letters)
		}
		return nil
	})
	ended(t, s)
}
