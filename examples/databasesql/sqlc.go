package databasesql

import (
	"context"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/examples/databasesql/invoices"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
	"github.com/holdfast-go/holdfast/txretry"
	"github.com/holdfast-go/holdfast/txretry/txretrysql"
)

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
