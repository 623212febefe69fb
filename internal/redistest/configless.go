package redistest

import (
	"context"

	"github.com/redis/go-redis/v9"
)

// Configless returns a client whose questions for the server's configuration fail with err.
func Configless(client redis.UniversalClient, err error) redis.UniversalClient {
	return configless{client, err}
}

type configless struct {
	redis.UniversalClient
	err error
}

func (c configless) ConfigGet(ctx context.Context, _ string) *redis.MapStringStringCmd {
	cmd := redis.NewMapStringStringCmd(ctx)
	cmd.SetErr(c.err)
	return cmd
}

// Refusal is an error that Redis answers with.
type Refusal string

func (r Refusal) Error() string { return string(r) }

// RedisError implements redis.Error.
func (Refusal) RedisError() {}
