package faults_test

import (
	"fmt"
	"sync"

	"github.com/google/uuid"
)

// deed is what a committed transaction did for one message: the database's word that the message
// must arrive, in place n of its key, from 1.
type deed struct {
	id  uuid.UUID
	key string // "" means no order
	n   int64
}

// ledger notes what the writers were told and what arrived. Its methods are safe for concurrent use.
type ledger struct {
	mu         sync.Mutex
	committed  map[uuid.UUID]bool // as the writers were told
	rolledBack map[uuid.UUID]bool
	excused    map[uuid.UUID]bool
	deliveries []uuid.UUID
	arrived    map[uuid.UUID]bool
	again      int // repeats that the broker calls its own
}

func newLedger() *ledger {
	return &ledger{
		committed: map[uuid.UUID]bool{}, rolledBack: map[uuid.UUID]bool{},
		excused: map[uuid.UUID]bool{}, arrived: map[uuid.UUID]bool{},
	}
}

// note takes a writer's word on the end of a transaction.
func (l *ledger) note(committed bool, ids []uuid.UUID) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, id := range ids {
		if committed {
			l.committed[id] = true
		} else {
			l.rolledBack[id] = true
		}
	}
}

// excuse takes messages whose absence is no fault of what is tested.
func (l *ledger) excuse(ids ...uuid.UUID) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, id := range ids {
		l.excused[id] = true
	}
}

// deliver notes an arrival. Again: the broker says that it sent the message before.
func (l *ledger) deliver(id uuid.UUID, again bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if again && l.arrived[id] {
		l.again++
	}
	l.deliveries = append(l.deliveries, id)
	l.arrived[id] = true
}

// delivered counts arrivals, repeats included.
func (l *ledger) delivered() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.deliveries)
}

// repeats counts arrivals after the first of a message.
func (l *ledger) repeats() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.deliveries) - len(l.arrived)
}

// missing are the messages of deeds that have not arrived and are not excused.
func (l *ledger) missing(deeds []deed) []uuid.UUID {
	l.mu.Lock()
	defer l.mu.Unlock()
	var ids []uuid.UUID
	for _, d := range deeds {
		if !l.arrived[d.id] && !l.excused[d.id] {
			ids = append(ids, d.id)
		}
	}
	return ids
}

// verdict is what an audit comes to.
type verdict struct {
	committed, rolledBack, delivered int
	lost                             int // committed, never delivered, not excused
	excused                          int // the same, excused
	duplicates                       int // deliveries after the first
	again                            int // of these, what the broker sent again
	depth                            int // how far behind the newest of its key a repeat came, at most
	faults                           []string
}

func (v verdict) String() string {
	return fmt.Sprintf("%d committed, %d rolled back, %d delivered, %d lost, %d excused, %d duplicates (%d by the broker), repeats at most %d behind",
		v.committed, v.rolledBack, v.delivered, v.lost, v.excused, v.duplicates, v.again, v.depth)
}

// maxFaults bounds what an audit quotes of each kind of fault.
const maxFaults = 5

// audit compares what was told, what arrived and what the database says.
func (l *ledger) audit(deeds []deed) verdict {
	l.mu.Lock()
	defer l.mu.Unlock()
	a := audit{ledger: l, deeds: map[uuid.UUID]deed{}, at: map[place]uuid.UUID{}, newest: map[string]int64{}, quoted: map[string]int{}}
	a.committed, a.rolledBack, a.delivered, a.again = len(deeds), len(l.rolledBack), len(l.deliveries), l.again
	for _, d := range deeds {
		a.deeds[d.id] = d
		a.at[place{d.key, d.n}] = d.id
	}
	a.words()
	a.order()
	a.losses()
	return a.verdict
}

type audit struct {
	verdict
	ledger *ledger
	deeds  map[uuid.UUID]deed
	at     map[place]uuid.UUID
	newest map[string]int64 // by key, of what has arrived
	quoted map[string]int
}

type place struct {
	key string
	n   int64
}

func (a *audit) fault(kind, format string, args ...any) {
	if a.quoted[kind]++; a.quoted[kind] <= maxFaults {
		a.faults = append(a.faults, kind+": "+fmt.Sprintf(format, args...))
	}
}

// words: what a writer was told is what the database says.
func (a *audit) words() {
	for id := range a.ledger.committed {
		if _, ok := a.deeds[id]; !ok {
			a.fault("a commit that was none", "%s", id)
		}
	}
	for id := range a.ledger.rolledBack {
		if _, ok := a.deeds[id]; ok {
			a.fault("a rollback that was none", "%s", id)
		}
	}
}

// order: the first deliveries of each key came in the order of its commits.
func (a *audit) order() {
	before := make(map[uuid.UUID]bool, len(a.ledger.arrived))
	for _, id := range a.ledger.deliveries {
		d, ok := a.deeds[id]
		switch {
		case !ok:
			a.fault("never committed, yet delivered", "%s", id)
			continue
		case before[id]:
			a.duplicates++
			if d.key != "" {
				a.depth = max(a.depth, int(a.newest[d.key]-d.n))
			}
		case d.key != "":
			a.first(d)
		}
		before[id] = true
	}
}

func (a *audit) first(d deed) {
	if d.n < a.newest[d.key] {
		a.fault("out of order", "key %s: %d arrived after %d", d.key, d.n, a.newest[d.key])
		return
	}
	for n := a.newest[d.key] + 1; n < d.n; n++ {
		if !a.ledger.excused[a.at[place{d.key, n}]] {
			a.fault("out of order", "key %s: %d arrived before %d", d.key, d.n, n)
		}
	}
	a.newest[d.key] = d.n
}

func (a *audit) losses() {
	for id, d := range a.deeds {
		switch {
		case a.ledger.arrived[id]:
		case a.ledger.excused[id]:
			a.excused++
		default:
			a.lost++
			a.fault("lost", "%s, %d of key %q", id, d.n, d.key)
		}
	}
}
