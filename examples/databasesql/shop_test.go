package databasesql_test

import (
	"context"
	"database/sql"
	_ "embed"
	"errors"
	"os"
	"slices"
	"testing"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"
	"gorm.io/driver/postgres"
	"gorm.io/gorm"
	"gorm.io/gorm/logger"

	"github.com/holdfast-go/holdfast/examples/databasesql"
	"github.com/holdfast-go/holdfast/examples/databasesql/invoices"
	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
	"github.com/holdfast-go/holdfast/txretry"
	"github.com/holdfast-go/holdfast/txretry/pgtest"
	"github.com/holdfast-go/holdfast/txretry/txretrysql"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

//go:embed invoices/schema.sql
var schema string

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func open(t *testing.T) (*databasesql.Shop, *sql.DB) {
	t.Helper()
	pool := pgtest.New(t) // for listening, pruning and the consumer's notes
	db := stdlib.OpenDB(*pool.Config().ConnConfig)
	t.Cleanup(func() { _ = db.Close() })
	orm, err := gorm.Open(postgres.New(postgres.Config{Conn: db}), &gorm.Config{Logger: logger.Discard})
	must(t, err)
	manager, err := txretrysql.New(db, pool, txretry.Config{})
	must(t, err)
	store, err := outboxpgx.New(pool, outboxpgx.Config{})
	must(t, err)
	must(t, store.Migrate(t.Context()))
	must(t, orm.AutoMigrate(&databasesql.Order{}))
	_, err = db.ExecContext(t.Context(), schema)
	must(t, err)
	return &databasesql.Shop{DB: orm, Manager: manager, Outbox: store}, db
}

func counts(t *testing.T, db *sql.DB) (orders, messages int) {
	t.Helper()
	must(t, db.QueryRowContext(t.Context(), "SELECT (SELECT count(*) FROM orders), (SELECT count(*) FROM holdfast_outbox)").Scan(&orders, &messages))
	return orders, messages
}

// GORM's order and its message commit together, or not at all.
func TestPlace(t *testing.T) {
	t.Parallel()
	shop, db := open(t)
	for n, place := range []func(ctx context.Context, o databasesql.Order) error{shop.Place, shop.PlaceInTransaction} {
		order := databasesql.Order{ID: uuid.NewString(), Cents: 4200}
		must(t, place(t.Context(), order))
		if err := place(t.Context(), order); err == nil {
			t.Error("one order was placed twice")
		}
		if orders, messages := counts(t, db); orders != n+1 || messages != n+1 {
			t.Errorf("%d orders, %d messages, want %d", orders, messages, n+1)
		}
	}
}

// A nested transaction of GORM is a savepoint. When it rolls back, so do its message and its function.
func TestPlace_nestedTransaction(t *testing.T) {
	t.Parallel()
	shop, db := open(t)
	refused := errors.New("refused")
	for _, failure := range []error{refused, nil} {
		var ran []string
		must(t, shop.Manager.Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
			session := shop.DB.Session(&gorm.Session{NewDB: true, Context: ctx})
			session.Statement.ConnPool = txretrysql.Tx(tx)
			place := func(orm *gorm.DB, name string) error {
				txretry.AfterCommit(tx, func() { ran = append(ran, name) })
				return errors.Join(orm.Create(&databasesql.Order{ID: uuid.NewString()}).Error,
					shop.Outbox.Write(ctx, tx, outbox.Message{Name: name, Body: []byte("{}")}))
			}
			must(t, place(session, "before"))
			err := session.Transaction(func(inner *gorm.DB) error { return errors.Join(place(inner, "nested"), failure) })
			if !errors.Is(err, failure) {
				t.Errorf("the nested transaction returned %v", err)
			}
			return place(session, "after")
		}))
		want := []string{"before", "nested", "after"}
		if failure != nil {
			want = []string{"before", "after"}
		}
		orders, messages := counts(t, db)
		if !slices.Equal(ran, want) || orders != messages || orders != len(want) {
			t.Errorf("%d orders, %d messages, functions %q, want %q", orders, messages, ran, want)
		}
		_, err := db.ExecContext(t.Context(), "TRUNCATE orders, holdfast_outbox")
		must(t, err)
	}
}

// Copies of a message are billed once, by the queries of sqlc.
func TestBooks(t *testing.T) {
	t.Parallel()
	shop, db := open(t)
	books, err := databasesql.NewBooks(shop.Manager)
	must(t, err)
	must(t, books.Migrate(t.Context()))
	m := &inbox.Message{
		ID: uuid.Must(uuid.NewV7()), Name: "order.placed", ContentType: "application/json", Attempt: 1,
		Body: []byte(`{"id": "a", "cents": 4200}`),
	}
	for range 3 {
		must(t, books.Process(t.Context(), []*inbox.Message{m})[0])
	}
	sum, err := invoices.New(db).SumInvoices(t.Context(), "a")
	must(t, err)
	if sum.Invoices != 1 || sum.Cents != 4200 {
		t.Errorf("%d invoices of %d cents", sum.Invoices, sum.Cents)
	}
}
