package redisconn

import (
	"context"
	"errors"

	"github.com/redis/go-redis/v9"
)

// Failed has the client of a Cluster ask again which node serves which slot, if err is not
// the answer of a server. The client by itself asks once a minute, and when a node refers it to
// another one, which a node that is gone does not do: the replica in its place would be unknown
// until then. Failed does not wait, and does nothing for other clients.
func Failed(ctx context.Context, client redis.UniversalClient, err error) {
	cluster, ok := client.(interface{ ReloadState(context.Context) })
	answer := redis.Error(nil)
	if !ok || err == nil || errors.As(err, &answer) || errors.Is(ctx.Err(), context.Canceled) {
		return
	}
	cluster.ReloadState(context.WithoutCancel(ctx)) // one at a time
}
