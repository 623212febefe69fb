// Package databasesql shows a shop on database/sql: orders are written with GORM and billed with code that
// sqlc has generated, and the promises are those of pgx. The guide is in examples/guides/databasesql.md.
package databasesql

import (
	"context"
	"database/sql"

	"github.com/jackc/pgx/v5"
	"gorm.io/gorm"

	"github.com/holdfast-go/holdfast/examples/databasesql/invoices"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
	"github.com/holdfast-go/holdfast/txretry"
	"github.com/holdfast-go/holdfast/txretry/txretrysql"
)

// Order is a model of GORM, and the message of its name.
type Order struct {
	ID    string `gorm:"primaryKey" json:"id"`
	Cents int64  `json:"cents"`
}

// Shop takes orders.
type Shop struct {
	DB      *gorm.DB
	Manager *txretry.Manager // txretrysql.New, on the *sql.DB that GORM uses
	Outbox  *outboxpgx.Store
}

// Place stores an order and its message in one transaction, and retries it after a conflict.
func (s *Shop) Place(ctx context.Context, o Order) error {
	return s.Manager.Do(ctx, func(ctx context.Context, tx pgx.Tx) error {
		if err := within(ctx, s.DB, tx).Create(&o).Error; err != nil {
			return err
		}
		return s.announce(ctx, tx, o)
	})
}

// within returns a session of GORM whose statements run in tx.
func within(ctx context.Context, db *gorm.DB, tx pgx.Tx) *gorm.DB {
	session := db.Session(&gorm.Session{NewDB: true, Context: ctx})
	session.Statement.ConnPool = txretrysql.Tx(tx)
	return session
}

// PlaceInTransaction does it in a transaction of GORM's own: nobody tries it again, and Wake follows the commit.
func (s *Shop) PlaceInTransaction(ctx context.Context, o Order) error {
	err := s.DB.WithContext(ctx).Transaction(func(db *gorm.DB) error {
		if err := db.Create(&o).Error; err != nil {
			return err
		}
		return s.announce(ctx, txretrysql.Wrap(db.Statement.ConnPool.(*sql.Tx)), o)
	})
	if err == nil {
		s.Outbox.Wake()
	}
	return err
}

func (s *Shop) announce(ctx context.Context, tx pgx.Tx, o Order) error {
	m, err := outbox.NewMessage("order.placed", o)
	if err != nil {
		return err
	}
	m.Key = o.ID // messages of one order stay in order
	return s.Outbox.Write(ctx, tx, m)
}

// NewBooks returns the consumer's processor, which bills each order once: the invoice commits together with the
// entry of the message.
func NewBooks(manager *txretry.Manager) (*inboxpgx.Store, error) {
	books, err := inboxpgx.New(manager, "billing", inboxpgx.Config{})
	if err != nil {
		return nil, err
	}
	err = inboxpgx.Handle(books, "order.placed", func(ctx context.Context, tx pgx.Tx, o Order) error {
		return invoices.New(txretrysql.Tx(tx)).AddInvoice(ctx, invoices.AddInvoiceParams{OrderID: o.ID, Cents: o.Cents})
	})
	return books, err
}
