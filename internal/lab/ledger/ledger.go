// Package ledger notes what writers of messages were told and what arrived, and compares both with what the database
// says committed: nothing lost, nothing that rolled back, and the first arrivals of each key in the order of its commits.
package ledger

import (
	"fmt"
	"sync"

	"github.com/google/uuid"
)

// Deed is what a committed transaction did for one message: the database's word that the message
// must arrive, in place N of its key, from 1.
type Deed struct {
	ID  uuid.UUID
	Key string // "" means no order
	N   int64
}

// Ledger notes what the writers were told and what arrived. Its methods are safe for concurrent use.
type Ledger struct {
	mu         sync.Mutex
	committed  map[uuid.UUID]bool // as the writers were told
	rolledBack map[uuid.UUID]bool
	excused    map[uuid.UUID]bool
	deliveries []uuid.UUID
	arrived    map[uuid.UUID]bool
	again      int // repeats that the broker calls its own
}

// New returns an empty ledger.
func New() *Ledger {
	return &Ledger{
		committed: map[uuid.UUID]bool{}, rolledBack: map[uuid.UUID]bool{},
		excused: map[uuid.UUID]bool{}, arrived: map[uuid.UUID]bool{},
	}
}

// Note takes a writer's word on the end of a transaction.
func (l *Ledger) Note(committed bool, ids []uuid.UUID) {
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

// Excuse takes messages whose absence is no fault of what is tested.
func (l *Ledger) Excuse(ids ...uuid.UUID) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, id := range ids {
		l.excused[id] = true
	}
}

// Deliver notes an arrival. Again: the broker says that it sent the message before.
func (l *Ledger) Deliver(id uuid.UUID, again bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if again && l.arrived[id] {
		l.again++
	}
	l.deliveries = append(l.deliveries, id)
	l.arrived[id] = true
}

// Committed counts the messages whose writers were told that they committed.
func (l *Ledger) Committed() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.committed)
}

// Delivered counts arrivals, repeats included.
func (l *Ledger) Delivered() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.deliveries)
}

// Repeats counts arrivals after the first of a message.
func (l *Ledger) Repeats() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.deliveries) - len(l.arrived)
}

// Missing are the messages of deeds that have not arrived and are not excused.
func (l *Ledger) Missing(deeds []Deed) []uuid.UUID {
	l.mu.Lock()
	defer l.mu.Unlock()
	var ids []uuid.UUID
	for _, d := range deeds {
		if !l.arrived[d.ID] && !l.excused[d.ID] {
			ids = append(ids, d.ID)
		}
	}
	return ids
}

// Verdict is what an audit comes to.
type Verdict struct {
	Committed, RolledBack, Delivered int
	Lost                             int // committed, never delivered, not excused
	Excused                          int // the same, excused
	Duplicates                       int // deliveries after the first
	Again                            int // of these, what the broker sent again
	Depth                            int // how far behind the newest of its key a repeat came, at most
	Faults                           []string
}

func (v Verdict) String() string {
	return fmt.Sprintf("%d committed, %d rolled back, %d delivered, %d lost, %d excused, %d duplicates (%d by the broker), repeats at most %d behind",
		v.Committed, v.RolledBack, v.Delivered, v.Lost, v.Excused, v.Duplicates, v.Again, v.Depth)
}

// maxFaults bounds what an audit quotes of each kind of fault.
const maxFaults = 5

// Audit compares what was told, what arrived and what the database says.
func (l *Ledger) Audit(deeds []Deed) Verdict {
	l.mu.Lock()
	defer l.mu.Unlock()
	a := audit{ledger: l, deeds: map[uuid.UUID]Deed{}, at: map[place]uuid.UUID{}, newest: map[string]int64{}, quoted: map[string]int{}}
	a.Committed, a.RolledBack, a.Delivered, a.Again = len(deeds), len(l.rolledBack), len(l.deliveries), l.again
	for _, d := range deeds {
		a.deeds[d.ID] = d
		a.at[place{d.Key, d.N}] = d.ID
	}
	a.words()
	a.order()
	a.losses()
	return a.Verdict
}

type audit struct {
	Verdict
	ledger *Ledger
	deeds  map[uuid.UUID]Deed
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
		a.Faults = append(a.Faults, kind+": "+fmt.Sprintf(format, args...))
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
		case !ok && a.ledger.excused[id]:
			continue
		case !ok:
			a.fault("never committed, yet delivered", "%s", id)
			continue
		case before[id]:
			a.Duplicates++
			if d.Key != "" {
				a.Depth = max(a.Depth, int(a.newest[d.Key]-d.N))
			}
		case d.Key != "":
			a.first(d)
		}
		before[id] = true
	}
}

func (a *audit) first(d Deed) {
	if d.N < a.newest[d.Key] {
		a.fault("out of order", "key %s: %d arrived after %d", d.Key, d.N, a.newest[d.Key])
		return
	}
	for n := a.newest[d.Key] + 1; n < d.N; n++ {
		if !a.ledger.excused[a.at[place{d.Key, n}]] {
			a.fault("out of order", "key %s: %d arrived before %d", d.Key, d.N, n)
		}
	}
	a.newest[d.Key] = d.N
}

func (a *audit) losses() {
	for id, d := range a.deeds {
		switch {
		case a.ledger.arrived[id]:
		case a.ledger.excused[id]:
			a.Excused++
		default:
			a.Lost++
			a.fault("lost", "%s, %d of key %q", id, d.N, d.Key)
		}
	}
}
