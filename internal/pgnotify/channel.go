// Package pgnotify wakes services of other processes by NOTIFY, apart from the
// transactions that give the reason: Postgres commits one transaction with a NOTIFY
// at a time, so a Sender sends its own, after the commit, and few of them. A
// notification that is lost costs the time to the next poll.
package pgnotify

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/pgcall"
)

// Channel is where the notifications of one table go: it belongs to the table,
// whatever name or search path leads to it.
type Channel struct {
	Pool   *pgxpool.Pool
	Prefix string // of the channel's name, before the table's oid
	Table  string // quoted
}

const (
	// channelSQL also keeps the server from ending the session: one that listens is idle by design. Postgres 13 has no
	// such timeout.
	channelSQL = `SELECT $1::text || $2::text::regclass::oid, count(set_config(name, '0', false)) FROM pg_settings WHERE name = 'idle_session_timeout'`
	notifySQL  = `SELECT pg_notify($1::text || $2::text::regclass::oid, $3)`
)

// timeout bounds one notification, and the begin of listening.
const timeout = 4 * time.Second

func (c Channel) notify(ctx context.Context, payload string) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	return pgcall.Use(ctx, c.Pool, func(ctx context.Context, conn *pgxpool.Conn) error {
		_, err := conn.Exec(ctx, notifySQL, c.Prefix, c.Table, payload)
		return worded(err)
	})
}

// worded says what it means that a table's channel is not known.
func worded(err error) error {
	if missing, ok := errors.AsType[*pgconn.PgError](err); ok && missing.Code == undefinedTable {
		return fmt.Errorf("%w: %w", ErrNoTable, err)
	}
	return err
}

// listen returns a connection that belongs to the caller, and listens.
func (c Channel) listen(ctx context.Context) (*pgx.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	conn, err := pgcall.Take(ctx, c.Pool)
	if err != nil {
		return nil, err
	}
	var name string
	if err = conn.QueryRow(ctx, channelSQL, c.Prefix, c.Table).Scan(&name, nil); err == nil {
		_, err = conn.Exec(ctx, "LISTEN "+pgx.Identifier{name}.Sanitize())
	}
	if err != nil {
		hangUp(conn)
		return nil, worded(err)
	}
	return conn, nil
}

func hangUp(conn *pgx.Conn) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	_ = conn.Close(ctx) // it is of no use either way
}

// payload is a time as text; the zero time is empty.
func payload(at time.Time) string {
	if at.IsZero() {
		return ""
	}
	return at.UTC().Format(time.RFC3339Nano)
}

// moment is what payload made. What it does not understand, from a version to
// come, is an unknown time.
func moment(payload string) time.Time {
	at, err := time.Parse(time.RFC3339Nano, payload)
	if err != nil {
		return time.Time{}
	}
	return at
}
