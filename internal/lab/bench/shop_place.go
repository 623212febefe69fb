package main

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/internal/testenv"
)

// shopPlace is where shops run one after the other: the program, and servers of its own that each run
// finds empty. Postgres notes when transactions commit, which servers elsewhere seldom do.
type shopPlace struct {
	program                        string
	postgresURL, redisURL, amqpURL string
	runs                           int
}

// shopPlace starts the servers when it is first asked for.
func (b *bench) shopPlace(ctx context.Context) (*shopPlace, error) {
	if b.shops != nil {
		return b.shops, nil
	}
	p := &shopPlace{}
	for _, server := range []struct {
		url   *string
		kind  testenv.Kind
		extra []string
	}{
		{&p.postgresURL, testenv.Postgres, []string{"-c", "track_commit_timestamp=on"}},
		{&p.redisURL, testenv.Redis, nil},
		{&p.amqpURL, testenv.RabbitMQ, nil},
	} {
		s, err := testenv.Launch(ctx, server.kind, server.extra...)
		if err != nil {
			return nil, err
		}
		b.atEnd(s.Close)
		*server.url = s.URL()
	}
	b.shops = p
	return p, p.build(ctx, b)
}

func (p *shopPlace) build(ctx context.Context, b *bench) error {
	dir, err := os.MkdirTemp("", "shop")
	if err != nil {
		return err
	}
	b.atEnd(func() error { return os.RemoveAll(dir) })
	p.program = filepath.Join(dir, "reservation")
	build := exec.CommandContext(ctx, "go", "build", "-buildvcs=false", "-o", p.program, "github.com/holdfast-go/holdfast/examples/reservation")
	if out, err := build.CombinedOutput(); err != nil {
		return fmt.Errorf("go build: %w\n%s", err, out)
	}
	return nil
}

// shopData is what one run leaves on the servers. RabbitMQ has nothing left when the read model is complete.
type shopData struct {
	place *shopPlace
	name  string
	url   string
	conn  *pgx.Conn
}

// newData makes a database and empties Redis.
func (p *shopPlace) newData(ctx context.Context) (*shopData, error) {
	opts, err := redis.ParseURL(p.redisURL)
	if err != nil {
		return nil, err
	}
	client := redis.NewClient(opts)
	err = errors.Join(client.FlushAll(ctx).Err(), client.Close())
	if err != nil {
		return nil, err
	}
	p.runs++
	d := &shopData{place: p, name: fmt.Sprintf("shop_%d", p.runs)}
	if err := execOn(ctx, p.postgresURL, "CREATE DATABASE "+d.name); err != nil {
		return nil, err
	}
	u, err := url.Parse(p.postgresURL)
	if err != nil {
		return nil, err
	}
	u.Path = d.name
	d.url = u.String()
	d.conn, err = pgx.Connect(ctx, d.url)
	return d, err
}

// vacuum leaves the tables as those of a shop that runs for long are.
func (d *shopData) vacuum(ctx context.Context) error {
	_, err := d.conn.Exec(ctx, "VACUUM ANALYZE")
	return err
}

func (d *shopData) drop() error {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	return errors.Join(d.conn.Close(ctx), execOn(ctx, d.place.postgresURL, "DROP DATABASE "+d.name+" WITH (FORCE)"))
}
