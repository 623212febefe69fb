package harness

import (
	"context"
	"fmt"
	"sync"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/internal/lab/harness/audit"
)

// Deed is the effect of a committed transaction for one message: the message must arrive as number N of its key, from 1.
type Deed struct {
	ID  uuid.UUID
	Key string
	N   int64
}

// Ledger records the messages that reach the broker, in order. Its methods are safe for concurrent use.
type Ledger struct {
	mu         sync.Mutex
	excused    map[uuid.UUID]bool
	deliveries []uuid.UUID
	arrived    map[uuid.UUID]bool
}

// NewLedger returns an empty ledger.
func NewLedger() *Ledger {
	return &Ledger{excused: map[uuid.UUID]bool{}, arrived: map[uuid.UUID]bool{}}
}

// Excuse marks messages whose absence is not a fault of the shop.
func (l *Ledger) Excuse(ids ...uuid.UUID) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, id := range ids {
		l.excused[id] = true
	}
}

func (l *Ledger) deliver(id uuid.UUID) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.deliveries = append(l.deliveries, id)
	l.arrived[id] = true
}

// Missing counts the messages of deeds that have not arrived and are not excused.
func (l *Ledger) Missing(deeds []Deed) (n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, d := range deeds {
		if !l.arrived[d.ID] && !l.excused[d.ID] {
			n++
		}
	}
	return n
}

// Verdict is the result of an audit.
type Verdict struct {
	Committed, Delivered, Lost int
	Duplicates                 int // deliveries after the first
	Faults                     []string
}

func (v Verdict) String() string {
	return fmt.Sprintf("%d committed, %d delivered, %d lost, %d duplicates", v.Committed, v.Delivered, v.Lost, v.Duplicates)
}

// Audit compares the arrivals with the deeds: everything committed arrived, nothing else did, and the first arrivals of each
// key came in commit order.
func (l *Ledger) Audit(deeds []Deed) Verdict {
	l.mu.Lock()
	defer l.mu.Unlock()
	b := books{ledger: l, deeds: map[uuid.UUID]Deed{}, at: map[position]uuid.UUID{}, newest: map[string]int64{}, quoted: map[string]int{}}
	b.Committed, b.Delivered = len(deeds), len(l.deliveries)
	for _, d := range deeds {
		b.deeds[d.ID] = d
		b.at[position{d.Key, d.N}] = d.ID
	}
	b.order()
	for id, d := range b.deeds {
		if !l.arrived[id] && !l.excused[id] {
			b.Lost++
			b.fault("lost", "%s, %d of key %q", id, d.N, d.Key)
		}
	}
	return b.Verdict
}

// books is an audit in progress.
type books struct {
	Verdict
	ledger *Ledger
	deeds  map[uuid.UUID]Deed
	at     map[position]uuid.UUID
	newest map[string]int64 // newest arrival by key
	quoted map[string]int
}

type position struct {
	key string
	n   int64
}

// maxFaults bounds the faults of each kind in the result of an audit.
const maxFaults = 5

func (b *books) fault(kind, format string, args ...any) {
	if b.quoted[kind]++; b.quoted[kind] <= maxFaults {
		b.Faults = append(b.Faults, kind+": "+fmt.Sprintf(format, args...))
	}
}

func (b *books) order() {
	before := make(map[uuid.UUID]bool, len(b.ledger.arrived))
	for _, id := range b.ledger.deliveries {
		d, ok := b.deeds[id]
		switch {
		case !ok && b.ledger.excused[id]:
			continue
		case !ok:
			b.fault("never committed, yet delivered", "%s", id)
			continue
		case before[id]:
			b.Duplicates++
		default:
			b.first(d)
		}
		before[id] = true
	}
}

func (b *books) first(d Deed) {
	if d.N < b.newest[d.Key] {
		b.fault("out of order", "key %s: %d arrived after %d", d.Key, d.N, b.newest[d.Key])
		return
	}
	for n := b.newest[d.Key] + 1; n < d.N; n++ {
		if !b.ledger.excused[b.at[position{d.Key, n}]] {
			b.fault("out of order", "key %s: %d arrived before %d", d.Key, d.N, n)
		}
	}
	b.newest[d.Key] = d.N
}

// historySQL makes triggers record every change of the shop's tables in its own transaction. The tables must exist.
const historySQL = `
create table chaos_history (
	token uuid not null default gen_random_uuid(), id bigint generated always as identity, what text not null,
	event uuid, reservation uuid, seat integer, seats integer[], status text, user_id text, message uuid);
create index on chaos_history (id);
create index on chaos_history (message) where message is not null;

create function chaos_event() returns trigger language plpgsql as $$ begin
	insert into chaos_history (what, event) values ('event', new.id);
	return null;
end $$;
create trigger chaos after insert on events for each row execute function chaos_event();

create function chaos_reservation() returns trigger language plpgsql as $$ begin
	insert into chaos_history (what, event, reservation, seats, status, user_id)
	values ('reservation', new.event_id, new.id, new.seats, new.status, new.user_id);
	return null;
end $$;
create trigger chaos after insert or update on reservations for each row execute function chaos_reservation();

create function chaos_seat() returns trigger language plpgsql as $$ begin
	insert into chaos_history (what, event, reservation, seat, status)
	values ('seat', new.event_id, new.reservation_id, new.number, new.state);
	return null;
end $$;
create trigger chaos after update on seats for each row execute function chaos_seat();

create function chaos_message() returns trigger language plpgsql as $$ begin
	insert into chaos_history (what, reservation, status, message) values ('message', new.ordering_key::uuid, new.name, new.id);
	return null;
end $$;
create trigger chaos after insert on holdfast_outbox for each row execute function chaos_message();

create function chaos_taken() returns trigger language plpgsql as $$ begin
	insert into chaos_history (what, message) values ('taken', new.message_id);
	return null;
end $$;
create trigger chaos after insert on holdfast_inbox for each row execute function chaos_taken();

create function chaos_effect() returns trigger language plpgsql as $$ begin
	insert into chaos_history (what, event, reservation, status) values ('effect', new.event_id, new.reservation_id, new.status);
	return null;
end $$;
create trigger chaos after insert or update on reservation_states for each row execute function chaos_effect();`

const changesSQL = `select token, id, what, coalesce(event::text, ''), coalesce(reservation::text, ''), coalesce(seat, 0),
	coalesce(seats, '{}'), coalesce(status, ''), coalesce(user_id, ''), coalesce(message, '00000000-0000-0000-0000-000000000000')
from chaos_history order by id`

// Querier is a connection or a pool.
type Querier interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

// Changes reads the committed changes. The order is right among changes that lock the same thing.
func Changes(ctx context.Context, q Querier) ([]audit.Change, error) {
	rows, _ := q.Query(ctx, changesSQL) // CollectRows returns its error
	return pgx.CollectRows(rows, func(row pgx.CollectableRow) (c audit.Change, err error) {
		return c, row.Scan(&c.Token, &c.ID, &c.What, &c.Event, &c.Reservation, &c.Seat, &c.Seats, &c.Status, &c.User, &c.Message)
	})
}

// readHistory reads all data from the database. It does not include the answers to clients.
func readHistory(ctx context.Context, q Querier) (h audit.History, err error) {
	if h.Changes, err = Changes(ctx, q); err != nil {
		return h, err
	}
	rows, _ := q.Query(ctx, "select id::text from events")
	if h.Events, err = pgx.CollectRows(rows, pgx.RowTo[string]); err != nil {
		return h, err
	}
	rows, _ = q.Query(ctx, `select r.id::text, r.event_id::text, r.user_id, r.status, r.seats, coalesce(s.status, ''), coalesce(s.messages, 0)
		from reservations r left join reservation_states s on s.reservation_id = r.id`)
	h.Reservations, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (r audit.Reservation, err error) {
		return r, row.Scan(&r.ID, &r.Event, &r.User, &r.Status, &r.Seats, &r.Known, &r.Messages)
	})
	if err != nil {
		return h, err
	}
	rows, _ = q.Query(ctx, `select event_id::text, state, reservation_id::text, number from seats where state <> 'free'`)
	h.Seats, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (s audit.Seat, err error) {
		return s, row.Scan(&s.Event, &s.State, &s.Reservation, &s.Number)
	})
	if err != nil {
		return h, err
	}
	return h, q.QueryRow(ctx, `select (select count(*) from holdfast_outbox), (select count(*) from holdfast_outbox_dead),
		(select count(*) from holdfast_inbox_waiting),
		(select count(*) from reservations where status = 'held' and expires_at <= clock_timestamp())`).
		Scan(&h.Left.Outbox, &h.Left.DeadOutbox, &h.Left.Parked, &h.Left.Due)
}

// Deeds returns the messages that must have reached the broker, in the order of their reservation.
func Deeds(changes []audit.Change) []Deed {
	var all []Deed
	places := map[string]int64{}
	for _, c := range changes {
		if c.What == audit.OfMessage {
			places[c.Reservation]++
			all = append(all, Deed{ID: c.Message, Key: c.Reservation, N: places[c.Reservation]})
		}
	}
	return all
}

// LostOf returns the changes that old has and now lacks.
func LostOf(old, now []audit.Change) []audit.Change {
	kept := make(map[uuid.UUID]bool, len(now))
	for _, c := range now {
		kept[c.Token] = true
	}
	var lost []audit.Change
	for _, c := range old {
		if !kept[c.Token] {
			lost = append(lost, c)
		}
	}
	return lost
}

// MessagesOf returns the messages that changes wrote or took.
func MessagesOf(changes []audit.Change) []uuid.UUID {
	var all []uuid.UUID
	for _, c := range changes {
		if c.What == audit.OfMessage || c.What == audit.OfTaken {
			all = append(all, c.Message)
		}
	}
	return all
}
