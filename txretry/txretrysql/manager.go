package txretrysql

import (
	"context"
	"database/sql"
	"errors"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/txretry"
	"github.com/holdfast-go/holdfast/txretry/driver"
)

// New returns a Manager that runs its transactions on db. pool is of the same database: stores on the
// Manager use it for what they do outside of transactions, such as to listen, prune and look up records.
// A few connections are enough; nil will do where nothing but transactions is needed. The error
// names every field of cfg that is wrong.
func New(db *sql.DB, pool *pgxpool.Pool, cfg txretry.Config) (*txretry.Manager, error) {
	if db == nil {
		return nil, errors.New("txretrysql: db is nil")
	}
	return txretry.NewOver(source{db, pool}, cfg)
}

// Tx returns the transaction of database/sql below tx: that of a Manager of [New], or what was given
// to [Wrap]. It is nil if tx is neither, or no longer open. It must not be ended.
func Tx(tx pgx.Tx) *sql.Tx {
	if own, ok := tx.(*bridge); ok {
		return own.tx
	}
	var found *sql.Tx
	if h, ok := tx.(interface {
		Expose()
		Statement(run func(s driver.Session) error) error
	}); ok {
		_ = h.Statement(func(s driver.Session) error { // its error says that the handle is stale
			if own, ok := s.(*session); ok {
				found = own.bridge.tx
			}
			return nil
		})
		if found != nil {
			h.Expose()
		}
	}
	return found
}

// Wrap returns a pgx.Tx whose statements run in tx, for outboxpgx.Store's Write and WriteOnce. The
// caller ends tx, and then calls Store.Wake. nil stays nil.
func Wrap(tx *sql.Tx) pgx.Tx {
	if tx == nil {
		return nil
	}
	return &bridge{tx: tx}
}

// Begin, Commit and Rollback belong to whoever has made the *sql.Tx.

func (b *bridge) Begin(context.Context) (pgx.Tx, error) { return nil, txretry.ErrManaged }
func (b *bridge) Commit(context.Context) error          { return txretry.ErrManaged }
func (b *bridge) Rollback(context.Context) error        { return txretry.ErrManaged }
