package idempotencypgx

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/internal/headers"
)

// Config configures a Store. The zero value is usable.
type Config struct {
	SchemaConfig
	// Lease is how long a claim lasts without renewal. 0: 30 s.
	Lease time.Duration
	// Retention is how long a completed record lasts. 0: 48 h.
	Retention time.Duration
}

const (
	defaultLease     = 30 * time.Second
	defaultRetention = 48 * time.Hour
)

func (c Config) withDefaults() Config {
	c.SchemaConfig = c.SchemaConfig.withDefaults()
	if c.Lease == 0 {
		c.Lease = defaultLease
	}
	if c.Retention == 0 {
		c.Retention = defaultRetention
	}
	return c
}

func (c Config) validate() error {
	var errs []error
	if c.Lease < 10*time.Millisecond {
		errs = append(errs, errors.New("idempotencypgx: Lease must be at least 10ms"))
	}
	if c.Retention < c.Lease {
		errs = append(errs, errors.New("idempotencypgx: Retention must not be shorter than Lease"))
	}
	_, err := c.quoted()
	return errors.Join(append(errs, err)...)
}

// Store is an idempotency.Store on a Postgres table: claims and records of
// services that have no Redis. Its statements are transactions of their own.
// It is safe for concurrent use.
type Store struct {
	asker *asker
	cfg   Config
	table string
	look  string // the one statement of a replay
}

// NewStore returns a store on pool, which stays the caller's to close. The
// table must exist: see Migrate.
func NewStore(pool *pgxpool.Pool, cfg Config) (*Store, error) {
	cfg = cfg.withDefaults()
	err := cfg.validate()
	if pool == nil {
		err = errors.Join(errors.New("idempotencypgx: pool is nil"), err)
	}
	if err != nil {
		return nil, err
	}
	table, err := cfg.quoted()
	if err != nil {
		return nil, err
	}
	return &Store{asker: newAsker(pool, table), cfg: cfg, table: table, look: `SELECT ` + recordColumns + `, lease_until - clock_timestamp()
		FROM ` + table + ` WHERE key = $1 AND coalesce(lease_until, expires_at) > clock_timestamp()`}, nil
}

// beginTries bounds the races that one Begin may lose: each needs a record
// that came or went between two statements.
const beginTries = 5

// Begin implements idempotency.Store. A replay is one SELECT and writes nothing.
func (s *Store) Begin(ctx context.Context, claim idempotency.Claim) (idempotency.Outcome, error) {
	if err := claim.Key.Validate(); err != nil {
		return idempotency.Outcome{}, err
	}
	for range beginTries {
		out, known, err := s.read(ctx, claim)
		if err != nil || known {
			return out, err
		}
		claimed, err := s.claim(ctx, claim)
		if err != nil {
			return idempotency.Outcome{}, err
		}
		if claimed {
			return idempotency.Outcome{State: idempotency.Acquired, Lease: s.cfg.Lease}, nil
		}
	}
	return idempotency.Outcome{}, errors.New("idempotencypgx: begin: the record keeps changing")
}

// read returns what the table knows; known is false if the key is free, or the
// claim's own.
func (s *Store) read(ctx context.Context, claim idempotency.Claim) (out idempotency.Outcome, known bool, err error) {
	var r row
	var left *time.Duration // nil: completed
	err = s.asker.ask(ctx, true, func(ctx context.Context, conn *pgxpool.Conn) error {
		return conn.QueryRow(ctx, s.look, string(claim.Key)).Scan(append(r.fields(), &left)...)
	})
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return out, false, nil
	case err != nil:
		return out, false, fmt.Errorf("idempotencypgx: begin: %w", err)
	case left == nil:
		return idempotency.Outcome{State: idempotency.Completed, Fingerprint: r.fingerprint, Response: r.response()}, true, nil
	case r.token == claim.Token:
		return out, false, nil
	}
	return idempotency.Outcome{State: idempotency.InProgress, Fingerprint: r.fingerprint, Lease: max(1, *left)}, true, nil
}

// claim takes the key if it is free by now, and renews the lease of who holds it.
func (s *Store) claim(ctx context.Context, claim idempotency.Claim) (bool, error) {
	rows, err := s.asker.exec(ctx, true, `INSERT INTO `+s.table+` AS t
			(key, fingerprint_version, fingerprint, status, token, lease_until, expires_at)
		VALUES ($1, $2, $3, 'processing', $4, clock_timestamp() + $5::interval, clock_timestamp() + $6::interval)
		ON CONFLICT (key) DO UPDATE SET
			fingerprint_version = excluded.fingerprint_version, fingerprint = excluded.fingerprint,
			status = 'processing', code = 0, headers = '{}', body = NULL, token = excluded.token,
			lease_until = clock_timestamp() + $5::interval, created_at = clock_timestamp(),
			expires_at = clock_timestamp() + $6::interval
		WHERE coalesce(t.lease_until, t.expires_at) <= clock_timestamp()
			OR t.status = 'processing' AND t.token = excluded.token`,
		string(claim.Key), claim.Fingerprint.Version, claim.Fingerprint.Sum, claim.Token, s.cfg.Lease, s.cfg.Retention)
	if pgErr, ok := errors.AsType[*pgconn.PgError](err); ok && pgErr.Code == serializationFailure {
		return false, nil // how a stricter default_transaction_isolation tells of a lost race
	}
	if err != nil {
		return false, fmt.Errorf("idempotencypgx: begin: %w", err)
	}
	return rows == 1, nil
}

// whileHeld is the condition of every statement of the holder.
const whileHeld = ` WHERE key = $1 AND token = $2 AND lease_until > clock_timestamp()`

// Extend implements idempotency.Store.
func (s *Store) Extend(ctx context.Context, claim idempotency.Claim) error {
	return s.change(ctx, "extend", `UPDATE `+s.table+` SET lease_until = clock_timestamp() + $3::interval`+whileHeld,
		string(claim.Key), claim.Token, s.cfg.Lease)
}

// Complete implements idempotency.Store.
func (s *Store) Complete(ctx context.Context, claim idempotency.Claim, resp idempotency.Response) error {
	header, err := headers.Encode(resp.Header)
	if err != nil {
		return fmt.Errorf("idempotencypgx: complete: %w", err)
	}
	err = s.change(ctx, "complete", `UPDATE `+s.table+` SET status = 'completed', lease_until = NULL,
			fingerprint_version = $3, fingerprint = $4, code = $5, headers = $6, body = $7,
			expires_at = clock_timestamp() + $8::interval`+whileHeld,
		string(claim.Key), claim.Token, claim.Fingerprint.Version, claim.Fingerprint.Sum,
		resp.Status, header, resp.Body, s.cfg.Retention)
	if !errors.Is(err, idempotency.ErrLeaseLost) {
		return err
	}
	done, lookErr := s.completedBy(ctx, claim)
	if lookErr != nil {
		return lookErr
	}
	if done {
		return nil
	}
	return err
}

// Release implements idempotency.Store.
func (s *Store) Release(ctx context.Context, claim idempotency.Claim) error {
	return s.change(ctx, "release", `DELETE FROM `+s.table+whileHeld, string(claim.Key), claim.Token)
}

// Check reports a missing or outdated table.
func (s *Store) Check(ctx context.Context) ([]idempotency.Finding, error) {
	return s.asker.check(ctx, s.table)
}

// change runs a statement that touches the row only while the claim holds it.
func (s *Store) change(ctx context.Context, step, sql string, args ...any) error {
	rows, err := s.asker.exec(ctx, false, sql, args...)
	if err != nil {
		return fmt.Errorf("idempotencypgx: %s: %w", step, err)
	}
	if rows == 0 {
		return fmt.Errorf("idempotencypgx: %s: %w", step, idempotency.ErrLeaseLost)
	}
	return nil
}

// completedBy tells a repeated Complete from a lost lease.
func (s *Store) completedBy(ctx context.Context, claim idempotency.Claim) (done bool, err error) {
	err = s.asker.ask(ctx, false, func(ctx context.Context, conn *pgxpool.Conn) error {
		return conn.QueryRow(ctx, `SELECT EXISTS (SELECT FROM `+s.table+`
			WHERE key = $1 AND token = $2 AND status = 'completed' AND expires_at > clock_timestamp())`,
			string(claim.Key), claim.Token).Scan(&done)
	})
	if err != nil {
		return false, fmt.Errorf("idempotencypgx: complete: %w", err)
	}
	return done, nil
}
