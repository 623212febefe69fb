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

// expectation predicts that the next request is of the same kind as the last one: a replay or a first run. Replays
// come in groups, when clients repeat interrupted requests. It only selects the statement to try first. It is safe
// for concurrent use.
type expectation struct{ replay atomic.Bool }

func (e *expectation) isReplay() bool { return e.replay.Load() }

// set writes only a changed value, because all requests read it.
func (e *expectation) set(replay bool) {
	if e.replay.Load() != replay {
		e.replay.Store(replay)
	}
}

// claims is a driver.Store whose claims are rows of the table, under leases. A claim and the record of its key are
// two rows. So renewing a claim never conflicts with the transaction that writes the record.
type claims struct {
	table    *table
	lease    time.Duration
	expected *expectation
	written  func() // called after a response was stored
}

// rowOf returns the key of the claim's row.
func rowOf(claim driver.Claim) string { return "claim:" + string(claim.Key) }

// beginTries limits the races that one Begin may lose: in each, a record was inserted or deleted between two
// statements. After that many tries the error is that the table ignores the claim.
const beginTries = 5

// Begin implements driver.Store. A replay writes nothing: it is one SELECT if a replay was expected. A first run is
// one INSERT if a first run was expected. A read-only server still replays.
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

// read returns the state of the key. known is false if the key is free, or held by claim itself.
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

// The actions of a claim on an existing row. leaveIt does nothing. takeOver takes a row whose claim or record has
// ended, and renews the lease if the token holds the key.
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

// claim inserts a row for the key, or takes an existing row as onConflict allows.
func (c *claims) claim(ctx context.Context, claim driver.Claim, onConflict string) (out driver.BeginResult, claimed bool, err error) {
	rows, err := c.table.asker.exec(ctx, true, `INSERT INTO `+c.table.name+` AS t
			(key, fingerprint_version, fingerprint, status, token, lease_until, expires_at)
		VALUES ($1, $2, $3, 'processing', $4, clock_timestamp() + $5::interval, clock_timestamp() + $6::interval)
		ON CONFLICT (key) DO `+onConflict,
		rowOf(claim), claim.Fingerprint.Version, claim.Fingerprint.Sum, claim.Token, c.lease, c.table.retention)
	if pgErr, ok := errors.AsType[*pgconn.PgError](err); ok && pgErr.Code == serializationFailure {
		return out, false, nil // a lost race under a stricter default_transaction_isolation
	}
	if err != nil {
		return out, false, fmt.Errorf("idempotencypgx: begin: %w", err)
	}
	if rows == 0 {
		return out, false, nil
	}
	return driver.BeginResult{State: driver.Acquired, Lease: c.lease}, true, nil
}

// whileHeld is the condition of every statement that the holder of the lease executes.
const whileHeld = ` WHERE key = $1 AND token = $2 AND lease_until > clock_timestamp()`

// Extend implements driver.Store.
func (c *claims) Extend(ctx context.Context, claim driver.Claim) error {
	return c.change(ctx, "extend", claim, func() (int64, error) {
		return c.table.asker.renew(ctx, `UPDATE `+c.table.name+` SET lease_until = clock_timestamp() + $3::interval`+whileHeld,
			rowOf(claim), claim.Token, c.lease)
	})
}

// Complete implements driver.Store. If the work took less than a lease, retention counts from the claim: a row with
// an unchanged expires_at needs no new index entries (a heap-only tuple).
func (c *claims) Complete(ctx context.Context, claim driver.Claim, resp driver.Response) error {
	header, err := headers.Encode(resp.Header)
	if err != nil {
		return fmt.Errorf("idempotencypgx: complete: %w", err)
	}
	err = c.change(ctx, "complete", claim, func() (int64, error) {
		return c.table.asker.exec(ctx, false, `UPDATE `+c.table.name+` SET status = 'completed', lease_until = NULL,
			fingerprint_version = $3, fingerprint = $4, code = $5, headers = $6, body = $7,
			expires_at = greatest(expires_at, clock_timestamp() + $8::interval)`+whileHeld,
			rowOf(claim), claim.Token, claim.Fingerprint.Version, claim.Fingerprint.Sum,
			resp.Status, header, resp.Body, c.table.retention-c.lease)
	})
	if !errors.Is(err, driver.ErrLeaseLost) {
		c.written()
	}
	return err
}

// Release implements driver.Store.
func (c *claims) Release(ctx context.Context, claim driver.Claim) error {
	return c.change(ctx, "release", claim, func() (int64, error) {
		return c.table.asker.exec(ctx, false, `DELETE FROM `+c.table.name+whileHeld, rowOf(claim), claim.Token)
	})
}

// change runs a statement that changes the claim's row. If it changes none, the lease is lost, or the table has ignored
// the change. A repeated Complete whose response is already stored returns nil.
func (c *claims) change(ctx context.Context, step string, claim driver.Claim, statement func() (int64, error)) error {
	var lost, completed bool
	ignored, err := pgcall.Changes(statement, func() (held bool, err error) {
		err = c.table.asker.ask(ctx, false, func(ctx context.Context, conn *pgxpool.Conn) error {
			return conn.QueryRow(ctx, `SELECT coalesce(lease_until > clock_timestamp(), false), status = 'completed' AND expires_at > clock_timestamp()
				FROM `+c.table.name+` WHERE key = $1 AND token = $2`, rowOf(claim), claim.Token).Scan(&held, &completed)
		})
		if errors.Is(err, pgx.ErrNoRows) {
			err = nil
		}
		lost = err == nil && !held
		return held, err
	})
	switch {
	case completed && step == "complete":
		return nil
	case ignored:
		err = pgcall.Ignored(c.table.name, "a change of a claim")
	case lost:
		err = driver.ErrLeaseLost
	case err == nil:
		return nil
	}
	return fmt.Errorf("idempotencypgx: %s: %w", step, err)
}

// alone is a driver.Store in which only the records decide.
type alone struct{ s *Store }

// Begin grants the claim without a lease, unless the key has a record.
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

// claimingAtBegin is alone for work that goes straight into a transaction, which claims the key when it begins.
type claimingAtBegin struct{ alone }

// claimingAtBegin returns the store for such work.
func (s *Store) claimingAtBegin() driver.Store {
	if s.claimsAtBegin {
		return claimingAtBegin{alone{s}}
	}
	return s
}

// Begin reads the record only if a replay is expected. A replay then costs one SELECT, instead of a transaction that
// finds a record and is rolled back.
func (p claimingAtBegin) Begin(ctx context.Context, claim driver.Claim) (driver.BeginResult, error) {
	if !p.s.expected.isReplay() {
		return driver.BeginResult{State: driver.Acquired}, nil
	}
	out, err := p.alone.Begin(ctx, claim)
	p.s.expected.set(out.State == driver.Completed)
	return out, err
}

func (a alone) Extend(context.Context, driver.Claim) error { return nil }

// Complete stores a response that was made without Do, for example a rejection. Nothing holds the key in the
// meantime. If another run was faster, its record is the answer.
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
