package testenv

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	goredis "github.com/redis/go-redis/v9"
)

// Promote makes a primary of a server that was started with Spec.Follows, and returns when it takes writes.
// It stays a primary when it is started again.
func (s *Server) Promote(ctx context.Context) error {
	switch e := s.engine.(type) {
	case *postgres:
		return s.wrap("promote", promotePostgres(ctx, s.URL()))
	case *redis:
		s.mu.Lock()
		e.spec.Follows = "" // else it would follow again after a restart
		s.mu.Unlock()
		return s.wrap("promote", promoteRedis(ctx, s.URL()))
	default:
		return fmt.Errorf("testenv: promote %s: it follows nobody", s.kind)
	}
}

func promotePostgres(ctx context.Context, url string) error {
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		return err
	}
	_, err = conn.Exec(ctx, "SELECT pg_promote()") // it waits
	return errors.Join(err, conn.Close(ctx))
}

func promoteRedis(ctx context.Context, url string) error {
	opts, err := goredis.ParseURL(url)
	if err != nil {
		return err
	}
	client := goredis.NewClient(opts)
	return errors.Join(client.SlaveOf(ctx, "NO", "ONE").Err(), client.Close())
}
