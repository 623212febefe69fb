// Package postgres is the shop in Postgres: the ports of package booking on
// txretry transactions, with the outbox, the inbox, the idempotency records and
// the sweeper's claims in the same database.
//
// Business transactions are SERIALIZABLE. The transactions of one event also queue
// in process (txretry.Options.SerialKey), because they all want the same seats. In
// the queue each buyer waits for the ones before. Without it, serialization failures
// would cost all of them their attempts.
package postgres

import (
	"context"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/examples/reservation/internal/booking"
	"github.com/holdfast-go/holdfast/examples/reservation/internal/flow"
	"github.com/holdfast-go/holdfast/examples/reservation/internal/messages"
	"github.com/holdfast-go/holdfast/expiry"
	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/txretry"
)

// Once runs fn in a transaction and stores its response there; *idempotencypgx.Store implements it.
type Once interface {
	DoWith(ctx context.Context, o txretry.Options,
		fn func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error)) (idempotency.Response, error)
}

// Shop is the shop in Postgres. It implements httpapi.Backend.
type Shop struct {
	Reader
	once   Once
	outbox Outbox
	holds  Holds
	flow   flow.Flow
}

// NewShop returns a shop that reads through pool and writes in transactions of
// once, which it notes in f.
func NewShop(pool *pgxpool.Pool, once Once, outbox Outbox, holds Holds, f flow.Flow) *Shop {
	return &Shop{Reader: NewReader(pool), once: once, outbox: outbox, holds: holds, flow: f}
}

// Once implements httpapi.Backend.
func (s *Shop) Once(ctx context.Context, eventID string,
	fn func(ctx context.Context, w booking.Work) (idempotency.Response, error),
) (idempotency.Response, error) {
	opts := txretry.Options{Name: "shop"}
	if eventID != "" {
		opts.SerialKey = "event:" + eventID
	}
	return s.once.DoWith(ctx, opts, func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
		txretry.AfterCommit(tx, func() { s.flow.Note(flow.Transaction, "committed") })
		return fn(ctx, &work{tx: tx, outbox: s.outbox, holds: s.holds})
	})
}

// Reader is booking.Reader on a pool.
type Reader struct{ pool *pgxpool.Pool }

var _ booking.Reader = Reader{}

// NewReader returns a Reader on pool.
func NewReader(pool *pgxpool.Pool) Reader { return Reader{pool} }

const (
	// readTimeout bounds one try of a read, which takes milliseconds if the server answers.
	readTimeout = 5 * time.Second
	readTries   = 3
)

// try reads, and reads again on another connection if one was silent.
func try(ctx context.Context, read func(ctx context.Context) error) (err error) {
	for range readTries {
		bounded, cancel := context.WithTimeout(ctx, readTimeout)
		err = read(bounded)
		silent := bounded.Err() != nil
		cancel()
		if err == nil || !silent || ctx.Err() != nil {
			return err
		}
	}
	return err
}

// Events implements booking.Reader.
func (r Reader) Events(ctx context.Context, after string, limit int) ([]booking.Event, error) {
	if after == "" {
		after = uuid.Nil.String()
	}
	var events []booking.Event
	err := try(ctx, func(ctx context.Context) (err error) {
		rows, err := r.pool.Query(ctx, "select id::text, name, seats from events where id > $1 order by events.id limit $2", after, limit)
		if err == nil {
			events, err = pgx.CollectRows(rows, pgx.RowToStructByPos[booking.Event])
		}
		return err
	})
	return events, err
}

const mapSQL = `
select number, case when held_until <= now() then 'free' else state end,
       coalesce(reservation_id::text, ''), coalesce(held_until, 'epoch')
from seats where event_id = $1 order by number`

// EventMap implements booking.Reader.
func (r Reader) EventMap(ctx context.Context, id string) (booking.EventMap, error) {
	e, err := r.event(ctx, id)
	if err != nil {
		return booking.EventMap{}, err
	}
	m := booking.EventMap{Event: e}
	err = try(ctx, func(ctx context.Context) (err error) {
		m.Map, err = collectSeats(r.pool.Query(ctx, mapSQL, id))
		return err
	})
	return m, err
}

func (r Reader) event(ctx context.Context, id string) (booking.Event, error) {
	if !validID(id) {
		return booking.Event{}, booking.NotFound("event")
	}
	e := booking.Event{ID: id}
	err := try(ctx, func(ctx context.Context) error {
		return r.pool.QueryRow(ctx, "select name, seats from events where id = $1", id).Scan(&e.Name, &e.Seats)
	})
	if errors.Is(err, pgx.ErrNoRows) {
		return booking.Event{}, booking.NotFound("event")
	}
	return e, err
}

const reservationSQL = `
select id::text, event_id::text, user_id, seats,
       case when status = 'held' and expires_at <= now() then 'expired' else status end, expires_at
from reservations where id = $1`

// Reservation implements booking.Reader.
func (r Reader) Reservation(ctx context.Context, id string) (booking.Reservation, error) {
	if !validID(id) {
		return booking.Reservation{}, booking.NotFound("reservation")
	}
	var found booking.Reservation
	err := try(ctx, func(ctx context.Context) (err error) {
		found, err = scanReservation(r.pool.QueryRow(ctx, reservationSQL, id))
		return err
	})
	return found, err
}

const statsSQL = `
select count(*) filter (where status = 'held'), count(*) filter (where status = 'confirmed'),
       count(*) filter (where status = 'cancelled'), count(*) filter (where status = 'expired')
from reservation_states where event_id = $1`

// Stats implements booking.Reader.
func (r Reader) Stats(ctx context.Context, eventID string) (booking.Stats, error) {
	if _, err := r.event(ctx, eventID); err != nil {
		return booking.Stats{}, err
	}
	var s booking.Stats
	err := try(ctx, func(ctx context.Context) error {
		return r.pool.QueryRow(ctx, statsSQL, eventID).Scan(&s.Held, &s.Confirmed, &s.Cancelled, &s.Expired)
	})
	return s, err
}

// NewInbox returns the inbox whose handlers update the read model, and note that in f.
func NewInbox(t txretry.Transactor, f flow.Flow) (*inboxpgx.Store, error) {
	store, err := inboxpgx.New(t, "stats", inboxpgx.Config{})
	if err != nil {
		return nil, err
	}
	return store, messages.Listen(store, func(ctx context.Context, tx pgx.Tx, status booking.Status, m messages.Reservation) error {
		txretry.AfterCommit(tx, func() { f.Note(flow.Updated, string(status)) })
		return learn(ctx, tx, status, m)
	})
}

// The higher rank wins, so the order of the messages does not matter.
const learnSQL = `
insert into reservation_states as known (reservation_id, event_id, status, rank, messages) values ($1, $2, $3, $4, 1)
on conflict (reservation_id) do update set
    status = case when known.rank < excluded.rank then excluded.status else known.status end,
    rank = greatest(known.rank, excluded.rank),
    messages = known.messages + 1`

// learn updates the read model by a message.
func learn(ctx context.Context, tx pgx.Tx, status booking.Status, m messages.Reservation) error {
	_, err := tx.Exec(ctx, learnSQL, m.ReservationID, m.EventID, status, status.Rank())
	return err
}

const sweptSQL = "select " + reservationColumns + " from reservations where id = any($1)"

// These are the seats of reservations that this transaction has locked and expired.
const freeSweptSQL = `
update seats set state = 'free', reservation_id = null, held_until = null
from reservations r
where r.id = any($1) and seats.event_id = r.event_id and seats.number = any(r.seats) and seats.reservation_id = r.id`

// Swept returns a function for the sweep's transaction. It frees the seats of the expired reservations and writes
// their messages.
func Swept(out Outbox) func(ctx context.Context, tx pgx.Tx, rows []expiry.Row) error {
	return func(ctx context.Context, tx pgx.Tx, rows []expiry.Row) error { return swept(ctx, tx, out, rows) }
}

func swept(ctx context.Context, tx pgx.Tx, out Outbox, rows []expiry.Row) error {
	ids := make([]string, len(rows))
	for i, row := range rows {
		ids[i] = row.ID
	}
	if _, err := tx.Exec(ctx, freeSweptSQL, ids); err != nil {
		return err
	}
	found, err := tx.Query(ctx, sweptSQL, ids)
	if err != nil {
		return err
	}
	expired, err := pgx.CollectRows(found, func(row pgx.CollectableRow) (booking.Reservation, error) { return scanReservation(row) })
	if err != nil {
		return err
	}
	msgs := make([]outbox.Message, len(expired))
	for i, r := range expired {
		if msgs[i], err = messages.New(r); err != nil {
			return err
		}
	}
	return out.Write(ctx, tx, msgs...)
}

//go:embed migrations/*.sql
var migrations embed.FS

// migrationTimeout bounds Migrate, including the wait for other migrations.
const migrationTimeout = 5 * time.Minute

// migrationLock is an arbitrary number that only the shop's migrations use.
const migrationLock = 7_204_118_331

// Migrate creates the shop's tables, or brings them up to date. Several
// processes may call it at once: one works, the others wait and find it done. It
// ends within five minutes.
func Migrate(ctx context.Context, pool *pgxpool.Pool) error {
	ctx, cancel := context.WithTimeout(ctx, migrationTimeout)
	defer cancel()
	files, err := fs.Glob(migrations, "migrations/*.sql") // in the order of their numbers
	if err != nil {
		return err
	}
	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		// A connection that falls silent must not keep the lock.
		if _, err := tx.Exec(ctx, "select set_config('idle_in_transaction_session_timeout', '5s', true)"); err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, "select pg_advisory_xact_lock($1)", migrationLock); err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, "create table if not exists shop_migrations (file text primary key)"); err != nil {
			return err
		}
		for _, file := range files {
			if err := applyOnce(ctx, tx, file); err != nil {
				return fmt.Errorf("%s: %w", file, err)
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("postgres: migrate: %w", err)
	}
	return nil
}

func applyOnce(ctx context.Context, tx pgx.Tx, file string) error {
	tag, err := tx.Exec(ctx, "insert into shop_migrations values ($1) on conflict do nothing", file)
	if err != nil || tag.RowsAffected() == 0 {
		return err
	}
	sql, err := migrations.ReadFile(file)
	if err != nil {
		return err
	}
	_, err = tx.Exec(ctx, string(sql))
	return err
}
