package inboxtest_test

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"log/slog"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
	"github.com/holdfast-go/holdfast/inbox/inboxtest"
	"github.com/holdfast-go/holdfast/internal/prove"
	"github.com/holdfast-go/holdfast/internal/prove/provetest"
	"github.com/holdfast-go/holdfast/internal/testenv/pgtest"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
	"github.com/holdfast-go/holdfast/txretry"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

const (
	proveTables = `CREATE TABLE invoices (order_id text NOT NULL, note text NOT NULL DEFAULT '');
		CREATE TABLE credit (cents int NOT NULL)`
	proveReset = "TRUNCATE invoices, credit, holdfast_inbox, holdfast_outbox; INSERT INTO credit VALUES (1000)"
)

type handlerFunc = func(ctx context.Context, tx pgx.Tx, o orderPlaced) error

// proven is the state of one process. A mistake is in it, or in state shared with other processes.
type proven struct {
	handle  handlerFunc
	prepare func(ctx context.Context) error
	wrap    inbox.Middleware
	waiter  inbox.Waiter
}

// proveHandler proves the handlers of the processes. Effects may be nil.
func proveHandler(t prove.TB, pool *pgxpool.Pool, effects func() int, process func(pool *pgxpool.Pool) proven) {
	proof := txretrytest.Proof{
		Pool: pool, Reset: proveReset, Effects: effects,
		Rows: []string{"TABLE invoices", "TABLE credit", "SELECT name FROM holdfast_outbox"},
	}
	m := inbox.Message{Name: "order.placed", Body: []byte(`{"order":"A-1"}`)}
	inboxtest.Prove(t, proof, m, func(pool *pgxpool.Pool) (inbox.Processor, error) {
		p := process(pool)
		manager, err := txretry.New(pool, txretry.Config{Logger: slog.New(slog.DiscardHandler)})
		if err != nil {
			return nil, err
		}
		books, err := inboxpgx.New(manager, "billing", inboxpgx.Config{ByName: map[string]inboxpgx.HandlerConfig{"order.placed": {Waiter: p.waiter}}})
		if err != nil {
			return nil, err
		}
		if p.wrap != nil {
			books.Use(p.wrap)
		}
		if p.prepare == nil {
			return books, inboxpgx.Handle(books, "order.placed", p.handle)
		}
		return books, inboxpgx.HandlePrepared(books, "order.placed",
			func(ctx context.Context, _ orderPlaced) (struct{}, error) { return struct{}{}, p.prepare(ctx) },
			func(ctx context.Context, tx pgx.Tx, o orderPlaced, _ struct{}) error { return p.handle(ctx, tx, o) })
	})
}

func newProvePool(t *testing.T) *pgxpool.Pool {
	t.Helper()
	pool := pgtest.New(t)
	manager, err := txretry.New(pool, txretry.Config{})
	noError(t, err)
	books, err := inboxpgx.New(manager, "billing", inboxpgx.Config{})
	noError(t, err)
	messages, err := outboxpgx.New(pool, outboxpgx.Config{})
	noError(t, err)
	noError(t, cmp.Or(books.Migrate(t.Context()), messages.Migrate(t.Context())))
	if _, err := pool.Exec(t.Context(), proveTables, pgx.QueryExecModeSimpleProtocol); err != nil {
		t.Fatal(err)
	}
	return pool
}

// execer is implemented by a pool and by a transaction.
type execer interface {
	Exec(ctx context.Context, sql string, args ...any) (tag pgconn.CommandTag, err error)
}

func invoice(ctx context.Context, db execer, o orderPlaced) error {
	_, err := db.Exec(ctx, "INSERT INTO invoices (order_id) VALUES ($1)", o.Order)
	return err
}

func charge(ctx context.Context, db execer) error {
	_, err := db.Exec(ctx, "UPDATE credit SET cents = cents - 100")
	return err
}

func bill(ctx context.Context, tx pgx.Tx, o orderPlaced) error {
	return inTurn(func() error { return invoice(ctx, tx, o) }, func() error { return charge(ctx, tx) })
}

// inTurn runs a step only if the earlier steps succeeded.
func inTurn(steps ...func() error) error {
	for _, step := range steps {
		if err := step(); err != nil {
			return err
		}
	}
	return nil
}

type waiterFunc func(ctx context.Context) error

func (f waiterFunc) Wait(ctx context.Context) error { return f(ctx) }

// A correct handler passes, whatever it uses.
func TestProve(t *testing.T) {
	t.Parallel()
	nothing := func(context.Context) error { return nil }
	t.Run("a mailer that deduplicates by the message's id", func(t *testing.T) {
		t.Parallel()
		var sent sync.Map
		count := func() (n int) {
			sent.Range(func(any, any) bool { n++; return true })
			return n
		}
		proveHandler(t, newProvePool(t), count, func(*pgxpool.Pool) proven {
			return proven{
				prepare: func(ctx context.Context) error {
					m, _ := inbox.FromContext(ctx)
					sent.LoadOrStore(m.ID, true)
					return nil
				},
				handle: func(ctx context.Context, tx pgx.Tx, o orderPlaced) error {
					m, _ := inbox.FromContext(ctx)
					_, err := tx.Exec(ctx, "INSERT INTO invoices (order_id, note) VALUES ($1, $2)", o.Order, m.ID.String())
					return err
				},
			}
		})
	})
	t.Run("a message", func(t *testing.T) {
		t.Parallel()
		proveHandler(t, newProvePool(t), nil, func(own *pgxpool.Pool) proven {
			messages, err := outboxpgx.New(own, outboxpgx.Config{Logger: slog.New(slog.DiscardHandler)})
			noError(t, err)
			return proven{handle: func(ctx context.Context, tx pgx.Tx, o orderPlaced) error {
				m, err := outbox.NewMessage("order.billed", o)
				if err != nil {
					return err
				}
				return inTurn(func() error { return bill(ctx, tx, o) }, func() error { return messages.Write(ctx, tx, m) })
			}}
		})
	})
	for name, process := range map[string]proven{
		"a step before, a waiter": {handle: bill, prepare: nothing, waiter: waiterFunc(nothing)},
		"a harmless hook": {handle: func(ctx context.Context, tx pgx.Tx, o orderPlaced) error {
			txretry.AfterCommit(tx, func() {})
			return bill(ctx, tx, o)
		}},
		"a statement with COMMIT": {handle: func(ctx context.Context, tx pgx.Tx, o orderPlaced) error {
			txretry.AtCommit(tx, "UPDATE credit SET cents = cents - 100")
			return invoice(ctx, tx, o)
		}},
		"a savepoint": {handle: func(ctx context.Context, tx pgx.Tx, o orderPlaced) error {
			err := pgx.BeginFunc(ctx, tx, func(sp pgx.Tx) error { return charge(ctx, sp) })
			if err != nil {
				return err
			}
			return invoice(ctx, tx, o)
		}},
		"a batch": {handle: func(ctx context.Context, tx pgx.Tx, o orderPlaced) error {
			var b pgx.Batch
			b.Queue("INSERT INTO invoices (order_id) VALUES ($1)", o.Order)
			b.Queue("UPDATE credit SET cents = cents - 100")
			return tx.SendBatch(ctx, &b).Close()
		}},
		"a copy": {handle: func(ctx context.Context, tx pgx.Tx, o orderPlaced) error {
			_, err := tx.CopyFrom(ctx, pgx.Identifier{"invoices"}, []string{"order_id"}, pgx.CopyFromRows([][]any{{o.Order}}))
			return err
		}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			proveHandler(t, newProvePool(t), nil, func(*pgxpool.Pool) proven { return process })
		})
	}
}

// planted is a handler with a mistake.
type planted struct {
	process func(pool *pgxpool.Pool) proven
	want    []string // in the error
}

// Each mistake is caught, and the error describes it.
func TestProveCatches(t *testing.T) {
	t.Parallel()
	const outside = "It wrote outside of its transaction"
	for name, mistake := range map[string]func(pool *pgxpool.Pool, mail func()) planted{
		"a write on the pool": func(_ *pgxpool.Pool, _ func()) planted {
			return planted{func(own *pgxpool.Pool) proven {
				return proven{handle: func(ctx context.Context, tx pgx.Tx, o orderPlaced) error {
					return inTurn(func() error { return charge(ctx, tx) }, func() error { return invoice(ctx, own, o) })
				}}
			}, []string{"killed after statement 3 of 4 (INSERT INTO invoices", "+ order_id=A-1 note=", outside, "Outside a transaction: INSERT INTO invoices"}}
		},
		"a write on another pool": func(other *pgxpool.Pool, _ func()) planted {
			return planted{same(proven{handle: func(ctx context.Context, tx pgx.Tx, o orderPlaced) error {
				return inTurn(func() error { return invoice(ctx, other, o) }, func() error { return charge(ctx, tx) })
			}}), []string{"killed before statement 2 of 3 (UPDATE", outside}}
		},
		"another way when a statement fails": func(_ *pgxpool.Pool, _ func()) planted {
			return planted{func(own *pgxpool.Pool) proven {
				return proven{handle: func(ctx context.Context, tx pgx.Tx, o orderPlaced) error {
					if err := bill(ctx, tx, o); err != nil {
						return invoice(ctx, own, o)
					}
					return nil
				}}
			}, []string{"killed before statement 2 of 4", "then the first one came back", "+ order_id=A-1", "went on after its connection was lost"}}
		},
		"a side effect": func(_ *pgxpool.Pool, mail func()) planted {
			return planted{same(proven{handle: func(ctx context.Context, tx pgx.Tx, o orderPlaced) error {
				mail()
				return bill(ctx, tx, o)
			}}), []string{"killed before statement 2 of 4 (INSERT", "Proof.Effects counts 2, 1 after an undisturbed run", "Send an idempotency key to the other side"}}
		},
		"a side effect after COMMIT": func(_ *pgxpool.Pool, mail func()) planted {
			return planted{same(proven{handle: func(ctx context.Context, tx pgx.Tx, o orderPlaced) error {
				txretry.AfterCommit(tx, mail)
				return bill(ctx, tx, o)
			}}), []string{"killed after statement 4 of 4 (commit)", "Proof.Effects counts 0, 1 after", "lost with the process"}}
		},
		"rows after COMMIT": func(_ *pgxpool.Pool, _ func()) planted {
			return planted{func(own *pgxpool.Pool) proven {
				return proven{handle: func(ctx context.Context, tx pgx.Tx, o orderPlaced) error {
					txretry.AfterCommit(tx, func() { _ = charge(ctx, own) })
					return invoice(ctx, tx, o)
				}}
			}, []string{"killed after statement 3 of 4 (commit)", "lost with the process"}}
		},
		"a step before that sends a mail": func(_ *pgxpool.Pool, mail func()) planted {
			return planted{same(proven{handle: bill, prepare: func(context.Context) error { mail(); return nil }}),
				[]string{"done, and asked for again", "Proof.Effects counts 2, 1 after", "Prepare step"}}
		},
		"a step before that writes": func(other *pgxpool.Pool, _ func()) planted {
			return planted{same(proven{handle: invoiceTx, prepare: func(ctx context.Context) error { return charge(ctx, other) }}),
				[]string{"done, and asked for again", "- cents=900", "+ cents=800", "Prepare step"}}
		},
		"middleware that writes": func(other *pgxpool.Pool, _ func()) planted {
			return planted{same(proven{handle: bill, wrap: func(ctx context.Context, _ *inbox.Message) (context.Context, func(error) error, error) {
				return ctx, func(err error) error { return errors.Join(err, charge(ctx, other)) }, nil
			}}), []string{"done, and asked for again", "in middleware"}}
		},
		"an error swallowed": func(_ *pgxpool.Pool, _ func()) planted {
			return planted{same(proven{handle: func(ctx context.Context, tx pgx.Tx, o orderPlaced) error {
				_ = bill(ctx, tx, o)
				return nil
			}}), []string{"refused by the server as too slow: statement 2 of 4 (INSERT", "it swallowed the error"}}
		},
		"an error swallowed in a savepoint": func(_ *pgxpool.Pool, _ func()) planted {
			return planted{same(proven{handle: func(ctx context.Context, tx pgx.Tx, o orderPlaced) error {
				_ = pgx.BeginFunc(ctx, tx, func(sp pgx.Tx) error { return charge(ctx, sp) })
				return invoice(ctx, tx, o)
			}}), []string{"refused by the server as too slow: statement 3 of 6 (UPDATE", "- cents=900", "The code swallowed the error, in a savepoint"}}
		},
		"every error marked unrecoverable": func(_ *pgxpool.Pool, _ func()) planted {
			return planted{same(proven{handle: func(ctx context.Context, tx pgx.Tx, o orderPlaced) error {
				if err := bill(ctx, tx, o); err != nil {
					return inbox.Unrecoverable(err)
				}
				return nil
			}}), []string{"refused by the server", "given up for good", "Mark only errors that you know"}}
		},
		"the time of the attempt": func(_ *pgxpool.Pool, _ func()) planted {
			return planted{same(proven{handle: func(ctx context.Context, tx pgx.Tx, o orderPlaced) error {
				return noted(ctx, tx, o, time.Now().String())
			}}), []string{"once more after Reset", "The values of note depend on the attempt"}}
		},
		"a random id": func(_ *pgxpool.Pool, _ func()) planted {
			return planted{same(proven{handle: func(ctx context.Context, tx pgx.Tx, o orderPlaced) error {
				return noted(ctx, tx, o, rand.Text())
			}}), []string{"once more after Reset", "The values of note depend on the attempt"}}
		},
		"a transaction that the handler ends": func(_ *pgxpool.Pool, _ func()) planted {
			return planted{same(proven{handle: func(ctx context.Context, tx pgx.Tx, o orderPlaced) error {
				_, err := tx.Exec(ctx, "COMMIT")
				return err
			}}), []string{"nothing fails", "The code ends its transaction itself"}}
		},
		"remembering in memory": func(_ *pgxpool.Pool, _ func()) planted {
			return planted{func(*pgxpool.Pool) proven {
				var seen sync.Map
				return proven{handle: func(ctx context.Context, tx pgx.Tx, o orderPlaced) error {
					if _, again := seen.LoadOrStore(o.Order, true); again {
						return nil
					}
					return bill(ctx, tx, o)
				}}
			}, []string{"the connection lost after statement 2 of 4", "- order_id=A-1", "remember in memory"}}
		},
		"a variable that is not set anew": func(_ *pgxpool.Pool, _ func()) planted {
			return planted{func(*pgxpool.Pool) proven {
				note := ""
				return proven{handle: func(ctx context.Context, tx pgx.Tx, o orderPlaced) error {
					note += "x"
					return noted(ctx, tx, o, note)
				}}
			}, []string{"+ order_id=A-1 note=xx", "ran twice in one process"}}
		},
		"nothing to compare": func(_ *pgxpool.Pool, _ func()) planted {
			return planted{same(proven{handle: func(context.Context, pgx.Tx, orderPlaced) error { return nil }}),
				[]string{"no row of Proof.Rows has changed"}}
		},
		"a handler that fails": func(_ *pgxpool.Pool, _ func()) planted {
			return planted{same(proven{handle: func(context.Context, pgx.Tx, orderPlaced) error { return errors.New("no such order") }}),
				[]string{"nothing fails: no such order"}}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := newProvePool(t)
			var mails atomic.Int64
			plant := mistake(pool, func() { mails.Add(1) })
			provetest.Caught(t, func(t prove.TB) {
				proveHandler(t, pool, func() int { return int(mails.Load()) }, plant.process)
			}, plant.want...)
		})
	}
}

// same is for processes that share nothing and do not differ.
func same(p proven) func(*pgxpool.Pool) proven { return func(*pgxpool.Pool) proven { return p } }

func invoiceTx(ctx context.Context, tx pgx.Tx, o orderPlaced) error { return invoice(ctx, tx, o) }

func noted(ctx context.Context, tx pgx.Tx, o orderPlaced, note string) error {
	_, err := tx.Exec(ctx, "INSERT INTO invoices (order_id, note) VALUES ($1, $2)", o.Order, note)
	return err
}

// A check before the write, outside a transaction, is enough until two processes check at once.
func TestProveCatchesTwoAtOnce(t *testing.T) {
	t.Parallel()
	pool := newProvePool(t)
	proof := txretrytest.Proof{Pool: pool, Reset: proveReset, Rows: []string{"TABLE invoices"}}
	m := inbox.Message{Name: "order.placed", Body: []byte(`{"order":"A-1"}`)}
	provetest.Caught(t, func(t prove.TB) {
		inboxtest.Prove(t, proof, m, func(own *pgxpool.Pool) (inbox.Processor, error) {
			mux := inbox.NewMux()
			return mux, inbox.Handle(mux, "order.placed", func(ctx context.Context, o orderPlaced) error {
				var billed bool
				err := own.QueryRow(ctx, "SELECT EXISTS (SELECT FROM invoices WHERE order_id = $1)", o.Order).Scan(&billed)
				if err != nil || billed {
					return err
				}
				return invoice(ctx, own, o)
			})
		})
	}, "two at once, the first waits before statement", "+ order_id=A-1", "Two processes did the work at once")
}
