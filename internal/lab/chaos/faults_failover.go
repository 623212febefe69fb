package main

import (
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/internal/lab/harness"
	"github.com/holdfast-go/holdfast/internal/lab/harness/audit"
	"github.com/holdfast-go/holdfast/internal/runloop"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// underLoad is how long clients go on before a primary dies that is about to.
const underLoad = time.Second

// failovers kill a primary and promote its standby. That of Postgres has everything that was committed.
func (d *dealer) failovers() []fault {
	down := time.Duration(d.rng.IntN(3000)) * time.Millisecond
	return []fault{
		{
			target: "postgres, synchronous",
			begin: func(ctx context.Context) error {
				if err := d.s.db.replicateSynchronously(ctx); err != nil {
					return err
				}
				if err := runloop.Sleep(ctx, underLoad); err != nil {
					return err
				}
				return d.s.db.server().Kill()
			},
			lasts: down,
			end: func(ctx context.Context) error {
				old, err := d.s.db.failOver(ctx)
				if err != nil {
					return err
				}
				return old.Close()
			},
			after: func(ctx context.Context) error { return d.s.db.addStandby(ctx) },
		},
		{
			target: "redis", forgets: 1,
			begin: func(context.Context) error { return d.s.redis.server().Kill() },
			lasts: down,
			end: func(ctx context.Context) error {
				old, err := d.s.redis.failOver(ctx)
				if err != nil {
					return err
				}
				return old.Close()
			},
			after: func(ctx context.Context) error { return d.s.redis.addStandby(ctx) },
		},
	}
}

// asyncFailovers promote a standby that is behind. What it lacks is read from the disk of the old primary.
func (d *dealer) asyncFailovers() []fault {
	var old *testenv.Server
	return []fault{{
		target: "postgres, asynchronous",
		begin: func(ctx context.Context) error {
			d.s.db.replication.Pause()
			if err := runloop.Sleep(ctx, underLoad); err != nil {
				return err
			}
			return d.s.db.server().Kill()
		},
		lasts: time.Duration(d.rng.IntN(3000)) * time.Millisecond,
		end: func(ctx context.Context) (err error) {
			old, err = d.s.db.failOver(ctx)
			return err
		},
		after: func(ctx context.Context) error {
			if err := d.s.noteLost(ctx, old); err != nil {
				return err
			}
			return errors.Join(old.Close(), d.s.db.addStandby(ctx))
		},
	}}
}

// replicateSynchronously has every commit wait for the standby from now on. The setting is that of this primary.
func (p *pair) replicateSynchronously(ctx context.Context) error {
	if err := p.s.onPostgres(ctx, "alter system set synchronous_standby_names = '*'", "select pg_reload_conf()"); err != nil {
		return err
	}
	return p.await(ctx, "select count(*) from pg_stat_replication where sync_state = 'sync'", "no standby is synchronous")
}

// noteLost starts the old primary once more, beside everything, and keeps what it has and the new one lacks.
func (s *system) noteLost(ctx context.Context, old *testenv.Server) error {
	if err := old.Start(ctx); err != nil {
		return err
	}
	conn, err := pgx.Connect(ctx, old.URL())
	if err != nil {
		return err
	}
	defer conn.Close(ctx)
	had, err := harness.Changes(ctx, conn)
	if err != nil {
		return err
	}
	// The new primary may be read later than the old one stopped: what it got since does no harm.
	var has []audit.Change
	err = harness.Poll(ctx, func(ctx context.Context) (err error) {
		has, err = harness.Changes(ctx, s.pool)
		return err
	})
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lost = append(s.lost, harness.LostOf(had, has)...)
	return nil
}

// losses are what failovers have lost.
func (s *system) losses() []audit.Change {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.lost
}
