package conformance

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/inbox"
)

// Partitions is the number of partitions in the fixtures of TestPartitions.
const Partitions = 4

// PartitionsBackend configures TestPartitions.
type PartitionsBackend struct {
	Runs
	// New returns a fresh fixture whose queue has four partitions.
	New func(t *testing.T) ConsumerFixture
	// Of returns the number of a message's partition.
	Of func(m *inbox.Message) int
}

// TestPartitions tests the contract of the consumers of a queue with several partitions.
func TestPartitions(t *testing.T, b PartitionsBackend) {
	runAll(t, b.Runs, b.New, map[string]subtest[ConsumerFixture]{
		"partition of a message":           {always, func(t *testing.T, f ConsumerFixture) { testPartitionOfMessage(t, f, b.Of) }},
		"order while shares change":        {always, testPartitionsOrder},
		"order when connections are cut":   {always, testPartitionsCut},
		"a new process gets its share":     {always, testPartitionsShare},
		"one limit for all":                {always, testPartitionsLimit},
		"messages in work":                 {once, testConsumerRunning(ordered(ConsumerConfig{}))},
		"dead letters go to their origins": {always, testPartitionsLetters},
	})
}

// served is a sequence that records which process has received messages of which partitions.
type served struct {
	*sequence

	mu sync.Mutex
	by map[string]map[string]bool
}

// oneProcess is the processor of one process.
type oneProcess struct {
	*served
	name string
}

// Process implements inbox.Processor.
func (p oneProcess) Process(ctx context.Context, msgs []*inbox.Message) []error {
	p.mu.Lock()
	for _, m := range msgs {
		if p.by == nil {
			p.by = map[string]map[string]bool{}
		}
		if p.by[p.name] == nil {
			p.by[p.name] = map[string]bool{}
		}
		p.by[p.name][m.Queue] = true
	}
	p.mu.Unlock()
	return p.sequence.Process(ctx, msgs)
}

// partitions returns from how many partitions a process has received messages since the last call.
func (s *served) partitions(process string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := len(s.by[process])
	delete(s.by, process)
	return n
}

// launch starts a process.
func (s *served) launch(t *testing.T, f ConsumerFixture, name string) *work {
	t.Helper()
	cfg := ordered(ConsumerConfig{})
	cfg.Concurrency = 2
	return launch(t, f, oneProcess{s, name}, cfg)
}

// more publishes messages and waits for their effects.
func (s *served) more(t *testing.T, f ConsumerFixture, keys, each int) {
	t.Helper()
	s.publish(f, keys, each)
	awaitCount(t, "messages done", keys*s.published, s.finished)
}

func testPartitionOfMessage(t *testing.T, f ConsumerFixture, of func(*inbox.Message) int) {
	const n = 40
	r := &runs{}
	want := map[uuid.UUID]int{}
	var msgs []*inbox.Message
	for i := range n {
		m := named("event")
		if i%4 > 0 {
			m.Key = fmt.Sprintf("key-%d", i%20)
		}
		want[m.ID] = of(m)
		msgs = append(msgs, m)
	}
	f.Publish(t, msgs...)
	consume(t, f, r, ordered(ConsumerConfig{}))
	awaitCount(t, "messages done", n, r.finished)
	used := map[string]bool{}
	for _, m := range r.messages() {
		used[m.Queue] = true
		if !strings.HasSuffix(m.Queue, fmt.Sprint(".", want[m.ID])) {
			t.Errorf("a message with the key %q came from %s, want partition %d", m.Key, m.Queue, want[m.ID])
		}
	}
	if len(used) != Partitions {
		t.Errorf("messages came from %d partitions", len(used))
	}
}

// Two processes share the partitions. One ends and another one starts while messages fail: every key stays in
// order.
func testPartitionsOrder(t *testing.T, f ConsumerFixture) {
	const keys, each = 12, 16
	s := &served{sequence: publishKeyed(t, f, keys, each)}
	s.fail = oneIn(15, errBoom)
	one, two := s.launch(t, f, "one"), s.launch(t, f, "two")
	awaitCount(t, "messages done", keys*each/4, s.finished)
	one.stop()
	three := s.launch(t, f, "three")
	s.more(t, f, keys, each)
	await(t, func() error { // a process may get its share only after the others have finished
		for _, process := range []string{"two", "three"} {
			if s.partitions(process) == 0 {
				s.more(t, f, keys, 1)
				return fmt.Errorf("process %s had nothing to do", process)
			}
		}
		return nil
	})
	two.stop()
	three.stop()
	wantRest(t, f, 0)
	if letters := dead(t, f); len(letters) != 0 {
		t.Errorf("%d dead letters", len(letters))
	}
}

// Cut connections, after which partitions change hands, lose neither messages nor the order of effects.
func testPartitionsCut(t *testing.T, f ConsumerFixture) {
	needsNetwork(t, f)
	const keys, each, cuts = 8, 5, 3
	s := &served{sequence: publishKeyed(t, f, keys, each)}
	s.overlaps = true // a process that has lost its connection finishes running messages, while another one starts
	s.fail = oneIn(15, errBoom)
	for _, name := range []string{"one", "two", "three"} {
		s.launch(t, f, name)
	}
	for range cuts {
		s.publish(f, keys, each)
		awaitCount(t, "messages done", keys*(s.published-each)+keys, s.finished)
		f.Network.CutConnections()
	}
	awaitCount(t, "messages done", keys*s.published, s.finished)
}

// A process that starts later gets its share of the partitions, and the first process keeps its own.
func testPartitionsShare(t *testing.T, f ConsumerFixture) {
	const keys = 32
	s := &served{sequence: publishKeyed(t, f, keys, 1)}
	s.launch(t, f, "one")
	s.more(t, f, keys, 1)
	if n := s.partitions("one"); n != Partitions {
		t.Fatalf("alone it serves %d partitions", n)
	}
	two := s.launch(t, f, "two")
	await(t, func() error {
		s.more(t, f, keys, 1)
		if a, b := s.partitions("one"), s.partitions("two"); a != Partitions/2 || b != Partitions/2 {
			return fmt.Errorf("%d and %d partitions", a, b)
		}
		return nil
	})
	two.stop()
	s.more(t, f, keys, 1)
	if n := s.partitions("one"); n != Partitions {
		t.Errorf("alone again it serves %d partitions", n)
	}
}

// A limit counts the messages of all partitions, and ends the whole Run.
func testPartitionsLimit(t *testing.T, f ConsumerFixture) {
	const keys, each, limit = 8, 4, 10
	s := publishKeyed(t, f, keys, each)
	cfg := ordered(ConsumerConfig{})
	cfg.MessageLimit = limit
	launch(t, f, s, cfg).wait()
	if n := s.finished(); n != limit {
		t.Errorf("%d messages, want %d", n, limit)
	}
	wantRest(t, f, keys*each-limit)
}

// The dead letters of all partitions are one list, and each returns to its partition.
func testPartitionsLetters(t *testing.T, f ConsumerFixture) {
	const keys = 8
	r := &runs{do: func(_ context.Context, m *inbox.Message) error {
		if m.Replays == 0 {
			return inbox.Unrecoverable(errBoom)
		}
		return nil
	}}
	w := consume(t, f, r, ordered(ConsumerConfig{}))
	publishKeyed(t, f, keys, 1)
	awaitDead(t, f, keys)
	was := map[string]string{}
	for _, m := range r.messages() {
		was[m.Key] = m.Queue
	}
	listed, err := w.DeadLetters().List(t.Context(), inbox.Filter{})
	if err != nil || len(listed) != keys {
		t.Fatalf("%d dead letters listed, error %v", len(listed), err)
	}
	for _, d := range listed {
		if d.Message.Queue != was[d.Message.Key] {
			t.Errorf("a dead letter of %s has the queue %s, want %s", d.Message.Key, d.Message.Queue, was[d.Message.Key])
		}
	}
	await(t, func() error {
		_, err := w.DeadLetters().Replay(t.Context(), inbox.Filter{}, inbox.Replay{By: "suite"})
		if n := r.finished(); n < keys {
			err = errors.Join(err, fmt.Errorf("%d of %d messages came back", n, keys))
		}
		return err
	})
	for _, m := range r.messages()[keys:] {
		if m.Queue != was[m.Key] || m.Replays != 1 {
			t.Errorf("%s came back from %s after %d replays, want %s", m.Key, m.Queue, m.Replays, was[m.Key])
		}
	}
}
