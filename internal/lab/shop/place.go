package shop

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/internal/testenv"
)

// Place is where shops run one after the other: the program, and servers of its own that each run
// finds empty. Postgres notes when transactions commit, which servers elsewhere seldom do.
type Place struct {
	Postgres, Redis, RabbitMQ *testenv.Server
	runs                      int
}

// Open starts the servers and builds the program. The caller must Close the place. Broker are further lines of
// rabbitmq.conf.
func Open(ctx context.Context, broker ...string) (_ *Place, err error) {
	p := &Place{}
	defer func() {
		if err != nil {
			err = errors.Join(err, p.Close())
		}
	}()
	for _, server := range []struct {
		into  **testenv.Server
		kind  testenv.Kind
		extra []string
	}{
		{&p.Postgres, testenv.Postgres, []string{"-c", "track_commit_timestamp=on"}},
		{&p.Redis, testenv.Redis, nil},
		{&p.RabbitMQ, testenv.RabbitMQ, broker},
	} {
		if *server.into, err = testenv.Launch(ctx, server.kind, server.extra...); err != nil {
			return nil, err
		}
	}
	_, err = Binary()
	return p, err
}

// Close ends the servers and removes the program.
func (p *Place) Close() error {
	Remove()
	var errs []error
	for _, s := range slices.Backward([]*testenv.Server{p.Postgres, p.Redis, p.RabbitMQ}) {
		if s != nil {
			errs = append(errs, s.Close())
		}
	}
	return errors.Join(errs...)
}

// Data is what one run leaves on the servers.
type Data struct {
	Conn    *pgx.Conn
	Servers Servers
	place   *Place
	name    string
}

// NewData makes a database and a virtual host, and empties Redis.
func (p *Place) NewData(ctx context.Context) (*Data, error) {
	opts, err := redis.ParseURL(p.Redis.URL())
	if err != nil {
		return nil, err
	}
	client := redis.NewClient(opts)
	err = errors.Join(client.FlushAll(ctx).Err(), client.Close())
	if err != nil {
		return nil, err
	}
	p.runs++
	d := &Data{place: p, name: fmt.Sprintf("shop_%d", p.runs)}
	if err := p.exec(ctx, "CREATE DATABASE "+d.name); err != nil {
		return nil, err
	}
	if err := testenv.AddVHost(ctx, p.RabbitMQ.AdminURL(), d.name); err != nil {
		return nil, err
	}
	u, err := url.Parse(p.Postgres.URL())
	if err != nil {
		return nil, err
	}
	u.Path = d.name
	d.Servers = Servers{Database: u.String(), Redis: p.Redis.URL(), Broker: p.RabbitMQ.URL() + d.name}
	d.Conn, err = pgx.Connect(ctx, u.String())
	return d, err
}

// exec runs a statement outside of every run's database.
func (p *Place) exec(ctx context.Context, sql string) error {
	conn, err := pgx.Connect(ctx, p.Postgres.URL())
	if err != nil {
		return err
	}
	_, err = conn.Exec(ctx, sql)
	return errors.Join(err, conn.Close(ctx))
}

// Vacuum leaves the tables as those of a shop that runs for long are.
func (d *Data) Vacuum(ctx context.Context) error {
	_, err := d.Conn.Exec(ctx, "VACUUM ANALYZE")
	return err
}

// Drop removes the database and the virtual host.
func (d *Data) Drop() error {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	return errors.Join(d.Conn.Close(ctx), d.place.exec(ctx, "DROP DATABASE "+d.name+" WITH (FORCE)"),
		testenv.RemoveVHost(ctx, d.place.RabbitMQ.AdminURL(), d.name))
}
