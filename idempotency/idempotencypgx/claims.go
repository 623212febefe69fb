package idempotencypgx

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/idempotency/driver"
	pgxdriver "github.com/holdfast-go/holdfast/idempotency/idempotencypgx/driver"
	"github.com/holdfast-go/holdfast/idempotency/internal/headers"
	"github.com/holdfast-go/holdfast/internal/pgcall"
	"github.com/holdfast-go/holdfast/internal/sqlstate"
)

// expectation is that the next request is what the last one was: a replay or not. Replays come
// in rows, when clients repeat what was cut off. It chooses which statement is tried first, and
// decides nothing. It is safe for concurrent use.
type expectation struct{ replay atomic.Bool }

func (e *expectation) isReplay() bool { return e.replay.Load() }

// set writes only what is new: all requests read it.
func (e *expectation) set(replay bool) {
	if e.replay.Load() != replay {
		e.replay.Store(replay)
	}
}

// claims is a driver.Store whose claims are rows of the table, under leases. A claim
// and the record of its key are two rows, so that renewing the one never conflicts
// with the transaction that writes the other.
type claims struct {
	table    *table
	lease    time.Duration
	expected *expectation
	written  func() // follows a response that was stored
}

// rowOf is the key of the claim's row.
func rowOf(claim driver.Claim) string { return "claim:" + string(claim.Key) }

// beginTries bounds the races that one Begin may lose: each needs a record that came or went between two
// statements. After so many the table ignores the claim.
const beginTries = 5

// Begin implements driver.Store. A replay writes nothing. It is one SELECT where a replay was
// expected, and a first run one INSERT where none was. A server that refuses writes still replays.
func (c *claims) Begin(ctx context.Context, claim driver.Claim) (driver.BeginResult, error) {
	if err := claim.Key.Validate(); err != nil {
		return driver.BeginResult{}, err
	}
	if !c.expected.isReplay() {
		out, claimed, err := c.claim(ctx, claim, leaveIt)
		if claimed || err != nil && !sqlstate.RefusesWrites(err) {
			return out, err
		}
	}
	for range beginTries {
		out, known, err := c.read(ctx, claim)
		if err == nil {
			c.expected.set(known)
		}
		if err != nil || known {
			return out, err
		}
		if out, claimed, err := c.claim(ctx, claim, takeOver); err != nil || claimed {
			return out, err
		}
	}
	return driver.BeginResult{}, fmt.Errorf("idempotencypgx: begin: %w", pgcall.Ignored(c.table.name, "a claim"))
}

// read returns what the table knows; known is false if the key is free, or the
// claim's own.
func (c *claims) read(ctx context.Context, claim driver.Claim) (out driver.BeginResult, known bool, err error) {
	var r row
	var left *time.Duration // nil: completed
	err = c.table.asker.ask(ctx, true, func(ctx context.Context, conn *pgxpool.Conn) error {
		return conn.QueryRow(ctx, `SELECT `+recordColumns+`, lease_until - clock_timestamp()
			FROM `+c.table.name+` WHERE key = $1 AND coalesce(lease_until, expires_at) > clock_timestamp()`, rowOf(claim)).Scan(append(r.fields(), &left)...)
	})
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return out, false, nil
	case err != nil:
		return out, false, fmt.Errorf("idempotencypgx: begin: %w", err)
	case left == nil:
		return driver.BeginResult{State: driver.Completed, Fingerprint: r.fingerprint, Response: r.response()}, true, nil
	case r.token == claim.Token:
		return out, false, nil
	}
	return driver.BeginResult{State: driver.InProgress, Fingerprint: r.fingerprint, Lease: max(1, *left)}, true, nil
}

// What a claim does with a row that is there: nothing, or it takes one whose claim or record has
// ended, and renews the lease of who holds it.
const (
	leaveIt  = `NOTHING`
	takeOver = `UPDATE SET
			fingerprint_version = excluded.fingerprint_version, fingerprint = excluded.fingerprint,
			status = 'processing', code = 0, headers = '{}', body = NULL, token = excluded.token,
			lease_until = clock_timestamp() + $5::interval, created_at = clock_timestamp(),
			expires_at = clock_timestamp() + $6::interval
		WHERE coalesce(t.lease_until, t.expires_at) <= clock_timestamp()
			OR t.status = 'processing' AND t.token = excluded.token`
)

// claim takes the key if it has no row, or a row that onConflict lets it have.
func (c *claims) claim(ctx context.Context, claim driver.Claim, onConflict string) (out driver.BeginResult, claimed bool, err error) {
	rows, err := c.table.asker.exec(ctx, true, `INSERT INTO `+c.table.name+` AS t
			(key, fingerprint_version, fingerprint, status, token, lease_until, expires_at)
		VALUES ($1, $2, $3, 'processing', $4, clock_timestamp() + $5::interval, clock_timestamp() + $6::interval)
		ON CONFLICT (key) DO `+onConflict,
		rowOf(claim), claim.Fingerprint.Version, claim.Fingerprint.Sum, claim.Token, c.lease, c.table.retention)
	if pgErr, ok := errors.AsType[*pgconn.PgError](err); ok && pgErr.Code == serializationFailure {
		return out, false, nil // how a stricter default_transaction_isolation tells of a lost race
	}
	if err != nil {
		return out, false, fmt.Errorf("idempotencypgx: begin: %w", err)
	}
	if rows == 0 {
		return out, false, nil
	}
	return driver.BeginResult{State: driver.Acquired, Lease: c.lease}, true, nil
}

// whileHeld is the condition of every statement of the holder.
const whileHeld = ` WHERE key = $1 AND token = $2 AND lease_until > clock_timestamp()`

// Extend implements driver.Store.
func (c *claims) Extend(ctx context.Context, claim driver.Claim) error {
	rows, err := c.table.asker.renew(ctx, `UPDATE `+c.table.name+` SET lease_until = clock_timestamp() + $3::interval`+whileHeld,
		rowOf(claim), claim.Token, c.lease)
	return c.changed(ctx, "extend", claim, rows, err)
}

// Complete implements driver.Store. Retention counts from the claim for work that is done within a
// lease: a row whose end stays needs no new index entries (a heap-only tuple).
func (c *claims) Complete(ctx context.Context, claim driver.Claim, resp driver.Response) error {
	header, err := headers.Encode(resp.Header)
	if err != nil {
		return fmt.Errorf("idempotencypgx: complete: %w", err)
	}
	rows, err := c.table.asker.exec(ctx, false, `UPDATE `+c.table.name+` SET status = 'completed', lease_until = NULL,
			fingerprint_version = $3, fingerprint = $4, code = $5, headers = $6, body = $7,
			expires_at = greatest(expires_at, clock_timestamp() + $8::interval)`+whileHeld,
		rowOf(claim), claim.Token, claim.Fingerprint.Version, claim.Fingerprint.Sum,
		resp.Status, header, resp.Body, c.table.retention-c.lease)
	if err = c.changed(ctx, "complete", claim, rows, err); !errors.Is(err, driver.ErrLeaseLost) {
		c.written()
	}
	return err
}

// Release implements driver.Store.
func (c *claims) Release(ctx context.Context, claim driver.Claim) error {
	rows, err := c.table.asker.exec(ctx, false, `DELETE FROM `+c.table.name+whileHeld, rowOf(claim), claim.Token)
	return c.changed(ctx, "release", claim, rows, err)
}

// changed returns why a statement of the holder changed no row: the lease is lost, or the table has ignored the change.
// An answer that is stored already is no failure of a Complete that is repeated.
func (c *claims) changed(ctx context.Context, step string, claim driver.Claim, rows int64, err error) error {
	if err == nil && rows > 0 {
		return nil
	}
	var held, completed bool
	if err == nil {
		err = c.table.asker.ask(ctx, false, func(ctx context.Context, conn *pgxpool.Conn) error {
			return conn.QueryRow(ctx, `SELECT coalesce(lease_until > clock_timestamp(), false), status = 'completed' AND expires_at > clock_timestamp()
				FROM `+c.table.name+` WHERE key = $1 AND token = $2`, rowOf(claim), claim.Token).Scan(&held, &completed)
		})
	}
	switch {
	case completed && step == "complete":
		return nil
	case held:
		err = pgcall.Ignored(c.table.name, "a change of a claim")
	case err == nil, errors.Is(err, pgx.ErrNoRows):
		err = driver.ErrLeaseLost
	}
	return fmt.Errorf("idempotencypgx: %s: %w", step, err)
}

// alone is a driver.Store in which the records alone decide.
type alone struct{ s *Store }

// Begin grants the claim without a lease: a record, or its absence, is all there is.
func (a alone) Begin(ctx context.Context, claim driver.Claim) (driver.BeginResult, error) {
	if err := claim.Key.Validate(); err != nil {
		return driver.BeginResult{}, err
	}
	rec, found, err := a.s.records.Lookup(ctx, claim.Key)
	switch {
	case err != nil:
		return driver.BeginResult{}, err
	case found:
		return completed(rec), nil
	}
	return driver.BeginResult{State: driver.Acquired}, nil
}

// claimingAtBegin is alone for work that goes straight into a transaction, which asks for the key
// when it begins.
type claimingAtBegin struct{ alone }

// claimingAtBegin returns the store to ask for such work.
func (s *Store) claimingAtBegin() driver.Store {
	if s.claimsAtBegin {
		return claimingAtBegin{alone{s}}
	}
	return s
}

// Begin asks nothing, unless a replay is expected. That is one SELECT then, where a
// transaction that finds a record has to be rolled back, too.
func (p claimingAtBegin) Begin(ctx context.Context, claim driver.Claim) (driver.BeginResult, error) {
	if !p.s.expected.isReplay() {
		return driver.BeginResult{State: driver.Acquired}, nil
	}
	out, err := p.alone.Begin(ctx, claim)
	p.s.expected.set(out.State == driver.Completed)
	return out, err
}

func (a alone) Extend(context.Context, driver.Claim) error { return nil }

// Complete stores what was answered without Do, such as a refusal. Nothing holds the key meanwhile: the record
// of a run that was faster is the answer.
func (a alone) Complete(ctx context.Context, claim driver.Claim, resp driver.Response) error {
	rec := pgxdriver.Record{Key: claim.Key, Token: claim.Token, Fingerprint: claim.Fingerprint, Response: resp}
	failure := a.s.tx.Do(ctx, func(ctx context.Context, tx pgx.Tx) error {
		return a.s.records.Insert(ctx, tx, rec)
	})
	if failure == nil {
		a.s.written()
		return nil
	}
	stored, found, err := a.s.records.Resolve(ctx, claim.Key)
	switch {
	case err != nil || !found:
		return failure
	case stored.Token != claim.Token:
		settle(claim, stored)
		return fmt.Errorf("idempotencypgx: complete: %w", driver.ErrLeaseLost)
	}
	return nil
}

func (a alone) Release(context.Context, driver.Claim) error { return nil }
