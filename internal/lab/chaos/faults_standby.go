package main

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"
	goredis "github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/internal/lab/harness"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// toStandbys returns a fault for each server that follows a primary. While a synchronous standby is away every commit waits:
// clients get no answer, and all goes on when it is back. Nobody waits for the two others: the shop must not notice, and
// they must follow again, so that a failover finds them.
func (d *dealer) toStandbys(what string, away func(context.Context, *testenv.Server) error, back func(context.Context, *testenv.Server) error) []fault {
	of := func(p *pair) fault {
		return d.fault("",
			func(ctx context.Context) error { return away(ctx, p.follower()) },
			func(ctx context.Context) error { return back(ctx, p.follower()) })
	}
	replica, asynchronous, synchronous := of(d.s.redis), of(d.s.db), of(d.s.db)
	replica.target, replica.after = "replica of redis"+what, d.s.redis.replicaFollows
	asynchronous.target, asynchronous.after = "asynchronous standby of postgres"+what, d.s.db.standbyFollows
	synchronous.target = "synchronous standby of postgres" + what
	leave := synchronous.begin
	synchronous.begin = func(ctx context.Context) error {
		if err := d.s.db.replicateSynchronously(ctx); err != nil {
			return err
		}
		if err := leave(ctx); err != nil {
			return err
		}
		return d.s.db.await(ctx, "select count(*) from pg_stat_activity where wait_event = 'SyncRep'", "no commit waits for the standby")
	}
	// Only then is the standby no longer waited for: it is its return that lets commits go on.
	synchronous.after = func(ctx context.Context) error {
		if err := d.s.db.standbyFollows(ctx); err != nil {
			return err
		}
		return d.s.onPostgres(ctx, "alter system reset synchronous_standby_names", "select pg_reload_conf()")
	}
	return []fault{replica, asynchronous, synchronous}
}

// standbyFollows returns when the standby of Postgres gets what its primary writes.
func (p *pair) standbyFollows(ctx context.Context) error {
	return p.await(ctx, "select count(*) from pg_stat_replication where state = 'streaming'", "the standby does not follow")
}

// await returns when a count on the primary of Postgres is above 0.
func (p *pair) await(ctx context.Context, sql, otherwise string) error {
	ctx, cancel := context.WithTimeout(ctx, testenv.Patience)
	defer cancel()
	conn, err := pgx.Connect(ctx, p.server().URL())
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	return harness.Poll(ctx, func(ctx context.Context) error {
		var n int
		if err := conn.QueryRow(ctx, sql).Scan(&n); err != nil {
			return fmt.Errorf("%s: %w", otherwise, err)
		}
		if n == 0 {
			return errors.New(otherwise)
		}
		return nil
	})
}

// replicaFollows returns when the replica of Redis gets what its primary writes.
func (p *pair) replicaFollows(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, testenv.Patience)
	defer cancel()
	opts, err := goredis.ParseURL(p.follower().URL())
	if err != nil {
		return err
	}
	client := goredis.NewClient(opts)
	err = harness.Poll(ctx, func(ctx context.Context) error {
		info, err := client.Info(ctx, "replication").Result()
		if err != nil || !strings.Contains(info, "master_link_status:up") {
			return errors.Join(errors.New("the replica does not follow"), err)
		}
		return nil
	})
	return errors.Join(err, client.Close())
}
