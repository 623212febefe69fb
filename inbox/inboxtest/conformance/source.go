package conformance

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
)

// OwnClass is a class of dead letters of its own that the sources of a fixture have.
const OwnClass = "payment"

// SourceFixture is one empty queue. Its dead letters have the class OwnClass besides the usual ones.
type SourceFixture struct {
	// New returns one more source of the queue, as another process has it.
	New func(t *testing.T) driver.Source
	// DeadLetters returns the dead letters of the queue's consumer.
	DeadLetters func(t *testing.T) driver.DeadLetters
	// Publish puts messages at the end of the queue, in this order: all that a sender sets of them.
	Publish func(t *testing.T, msgs ...*inbox.Message)

	// Network is what the sources' connections go through, and nothing else's. Without it the
	// tests of faults are skipped.
	Network Network
	// Forgetful says that the queue may forget acknowledgements that are on their way when a session ends.
	Forgetful bool
	// Delete deletes the queue; declare makes it again, empty. Optional.
	Delete func(t *testing.T) (declare func())
	// Refuse has the place of a class of dead letters take nothing until mend is called: it is
	// missing, full or forbidden. Optional.
	Refuse func(t *testing.T, class string) (mend func())
	// Another returns the source of another consumer that gets the same messages. Optional.
	Another func(t *testing.T) driver.Source
}

// Network breaks connections; a testenv.Proxy of this module is one. Its methods may be called from
// any goroutine.
type Network interface {
	// CutConnections ends all that are open; others can be made.
	CutConnections()
	// Pause has nothing pass in either direction, and everything stay open.
	Pause()
	// DropReplies has requests pass and answers not.
	DropReplies()
	// Heal ends what Pause and DropReplies began.
	Heal()
}

// SourceBackend is where TestSource runs.
type SourceBackend struct {
	Runs
	// New returns a fresh fixture.
	New func(t *testing.T) SourceFixture
}

// TestSource holds a transport to the contract of driver.Source, Session and DeadLetters.
func TestSource(t *testing.T, b SourceBackend) { runAll(t, b.Runs, b.New, sourceTests) }

var sourceTests = map[string]subtest[SourceFixture]{
	"envelope":                      {once, testSourceEnvelope},
	"window":                        {always, testSourceWindow},
	"receive ends with its context": {once, testSourceReceiveEnds},
	"random acknowledgements":       {once, testSourceAcks},
	"given back":                    {always, testSourceGiveBack},
	"closed":                        {always, testSourceClose},
	"stale deliveries":              {once, testSourceStale},
	"stop under a flood":            {once, testSourceStop},
	"handed over":                   {always, testSourceHandOver},
	"no queue":                      {once, testSourceMissing},
	"run and ready":                 {once, testSourceRun},
	"backlog":                       {always, testSourceBacklog},

	"moved to later":        {always, testMoveLater},
	"moved as it is":        {once, testMoveKeepsAll},
	"moved to the tail":     {once, testMoveTail},
	"moved to dead letters": {always, testMoveDead},
	"dead after retries":    {once, testDeadKeepsProgress},
	"place takes none":      {once, testMoveRefused},
	"moved without Run":     {fakes, testMoveWithoutRun},
	"moved when stale":      {once, testMoveStale},
	"another consumer":      {once, testMoveForOneConsumer},

	"scan":              {once, testScan},
	"scan and return":   {once, testScanReturns},
	"scan ends":         {once, testScanEnds},
	"concurrent scans":  {once, testScansAtOnce},
	"scans with faults": {once, testScanFaults},

	"answers of calls are lost": {once, testSourceCalls(Network.DropReplies)},
	"calls are cut":             {fakes, testSourceCalls(Network.CutConnections)},
}

// running returns a source whose Run is at work until the test ends.
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
	t.Cleanup(func() { _ = session.Close(context.WithoutCancel(t.Context())) }) // as a rule it is closed
	noError(t, session.Start(t.Context(), window))
	return session
}

// take receives so many messages.
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
			t.Fatalf("%d messages where at most %d were asked for", len(ds), n-len(all))
		}
		all = append(all, ds...)
	}
	return all
}

// quiet is how long nothing must come where nothing may.
const quiet = 100 * time.Millisecond

// wantNothing ends the test when a message comes.
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

// move moves messages as an engine does: the originals are acknowledged unless the move has done so.
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

// bury makes a dead letter of each message.
func bury(t *testing.T, source driver.Source, s driver.Session, class string, ds ...driver.Delivery) {
	t.Helper()
	moves := make([]driver.Move, len(ds))
	for i, d := range ds {
		failure := driver.Failure{Err: errors.New("broken"), Class: class}
		moves[i] = driver.Move{Delivery: d, Target: driver.ToDead, Letter: driver.NewDeadLetter(d.Message(), failure, "suite", time.Now().Truncate(time.Millisecond))}
	}
	moved(t, source, s, moves...)
}

// numbered publishes messages whose names count from 1.
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
