package conformance

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/inbox/driver"
)

// calls are those of a session, and Move, each for the first half of what is in hand where it settles.
var calls = map[string]func(ctx context.Context, source driver.Source, s driver.Session, half []driver.Delivery) error{
	"Start": func(ctx context.Context, _ driver.Source, s driver.Session, _ []driver.Delivery) error {
		return errors.Join(s.Stop(ctx), s.Start(ctx, 5))
	},
	"Receive": func(ctx context.Context, _ driver.Source, s driver.Session, _ []driver.Delivery) error {
		short, cancel := context.WithTimeout(ctx, time.Second) // a source may go on over another connection
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
			return driver.Move{Delivery: d, Target: driver.ToDead, Letter: letter}
		})
	},
}

// moveAll moves deliveries, and settles those originals whose copies are stored.
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

// testSourceCalls has a fault meet every call. What a call was not about comes again, and what it was
// about is where the call has taken it, or comes again.
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
		for _, name := range names { // one session is served at a time
			t.Log(name)
			faultyCalls(t, f, fault, name)
		}
	}
}

// faultyCalls makes calls at once, each of a source of its own, while the network has a fault.
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

// inHand takes n messages; some may be copies of before.
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
			_ = session.Close(t.Context()) // the next try begins anew
			return err
		}
		s = session
		return nil
	})
	return s, ds
}

// consumeUntil acknowledges what comes, until nothing is missing or nothing comes.
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

// What no consumer has is counted: what was never delivered, what was given back, and, apart from one another,
// what waits for its next attempt and what is put off. What a consumer has is not.
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
	// A broker with shorter steps has the one that waits come back, and the session has room to send it on.
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

// receiving has a session receive while do runs, for it sends on what only passes through it. Nothing may come.
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
