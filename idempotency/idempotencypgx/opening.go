package idempotencypgx

import (
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/holdfast-go/holdfast/idempotency/driver"
	pgxdriver "github.com/holdfast-go/holdfast/idempotency/idempotencypgx/driver"
	"github.com/holdfast-go/holdfast/txretry"
	txdriver "github.com/holdfast-go/holdfast/txretry/driver"
)

// opening is what a transaction learns of its key when it begins.
type opening struct {
	record pgxdriver.Record
	found  bool // record is the key's
	locked bool // no other transaction has the key
	taken  bool // one was refused because another one has it
	begun  bool // one has begun, or may have failed on an earlier effect before it could
}

// opening has the transaction claim the key together with BEGIN, where nothing in front of
// the records does. The claim is an advisory lock that ends with the transaction. With looks
// it looks for the record first. One that commits between the look and the lock is not seen:
// the records' primary key stops a second effect.
func (s *Store) opening(key driver.Key, o txretry.Options, looks bool) (txretry.Options, *opening) {
	if !s.claimsAtBegin || o.AtBegin.SQL != "" {
		return o, &opening{locked: true, begun: o.AtBegin.SQL != ""}
	}
	at := &opening{}
	o.AtBegin = txdriver.Statement{
		SQL:  `SELECT WHERE pg_try_advisory_xact_lock(hashtextextended($1, 0))`,
		Args: []any{"idempotencypgx " + s.table.name + " " + string(key)},
		Done: func(tag pgconn.CommandTag) { at.locked = tag.RowsAffected() == 1 },
	}
	if looks {
		o.AtBegin.Look = &txdriver.Look{SQL: s.table.find, Args: []any{string(key)}, Read: func(row pgx.Row) (err error) {
			at.record, at.found, err = recordOf(key, row)
			s.expected.set(at.found)
			return err
		}}
	}
	return o, at
}

// refusal returns why the work must not run in a transaction that has begun.
func (at *opening) refusal() error {
	at.begun = true
	switch {
	case at.found:
		return errDone
	case !at.locked:
		at.taken = true
		return errTaken
	}
	return nil
}
