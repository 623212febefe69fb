package outboxpgx

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
	txdriver "github.com/holdfast-go/holdfast/txretry/driver"
)

// Write stores messages as part of tx, in their order, with one statement. On a handle of txretry
// the statement waits for COMMIT, if possible, and its error comes out of Do; on any other transaction
// it runs at once. For a *sql.Tx see package txretrysql.
//
// The messages belong to the savepoint that is open at the call, whoever has set it and however, and
// to the role and the search_path of that moment: see txretry.AtCommit.
//
// What outbox.Prepare refuses is refused here, as joined *outbox.MessageError, before anything is
// sent, and the transaction stays usable. A message id that is in the table already is the unique
// violation of Postgres (23505).
//
// After the commit a relay is woken up: see the package documentation. Nothing wakes one after the
// commit of a transaction that is not txretry's: call Wake then, or let relays poll.
//
// Messages of one ordering key are published in the order in which they were written only if the
// transactions that write them are ordered: lock or update a row that belongs to the key before
// writing.
func (s *Store) Write(ctx context.Context, tx pgx.Tx, msgs ...outbox.Message) error {
	if tx == nil {
		return errors.New("outboxpgx: Write needs a transaction")
	}
	if len(msgs) == 0 {
		return nil
	}
	prepared, err := outbox.Prepare(ctx, msgs, s.cfg.MaxBodyBytes)
	if err != nil {
		return err
	}
	return s.put(ctx, tx, prepared)
}

// put inserts prepared messages, together with COMMIT where the handle can do that.
func (s *Store) put(ctx context.Context, tx pgx.Tx, prepared []driver.Message) error {
	insert, args, err := s.insert(prepared)
	if err != nil {
		return err
	}
	if !s.t.missing().AtCommit(tx, insert, args...) {
		if _, err := tx.Exec(ctx, insert, args...); err != nil {
			return fmt.Errorf("outboxpgx: write: %w", s.t.explain(err))
		}
	}
	txdriver.Hint(tx, s.afterCommit)
	return nil
}

// insert returns the statement for the messages. A single one, the usual case, gets a statement of
// its own: unnesting eleven arrays costs the server more than the row.
func (s *Store) insert(msgs []driver.Message) (string, []any, error) {
	if len(msgs) == 1 {
		r, err := rowOf(msgs[0])
		return s.sql.insertOne, []any{
			r.id, r.lane, r.name, r.body, r.contentType, r.headers, r.key,
			r.transport, r.exchange, r.routingKey, r.routeHeaders, r.notBefore,
		}, err
	}
	args, err := insertArgs(msgs)
	return s.sql.insert, args, err
}
