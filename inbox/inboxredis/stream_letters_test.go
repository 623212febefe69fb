package inboxredis_test

import (
	"context"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/inboxredis"
	"github.com/holdfast-go/holdfast/internal/ids"
)

// largestReply notes how many bytes of texts a reply of a script has at most.
type largestReply struct{ bytes *atomic.Int64 }

func (l largestReply) DialHook(next redis.DialHook) redis.DialHook { return next }

func (l largestReply) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

func (l largestReply) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		err := next(ctx, cmd)
		if reply, ok := cmd.(*redis.Cmd); ok {
			l.bytes.Store(max(l.bytes.Load(), textBytes(reply.Val())))
		}
		return err
	}
}

func textBytes(value any) (n int64) {
	switch v := value.(type) {
	case string:
		return int64(len(v))
	case []any:
		for _, one := range v {
			n += textBytes(one)
		}
	}
	return n
}

// A scan reads pages of 4 MiB and one letter at most, also where the letters before were small, and a count reads none.
func TestDeadLetters_pagesHaveABoundInBytes(t *testing.T) {
	t.Parallel()
	const small, large, size = 100, 12, 1 << 20
	f := newFixture(t, false)
	key := "{" + stream + "}:" + groupName + ":failed." + driver.ClassDefault
	for i := range small + large {
		body := "{}"
		if i >= small {
			body = `"` + strings.Repeat("x", size) + `"`
		}
		id := f.direct.XAdd(t.Context(), &redis.XAddArgs{Stream: key, Values: map[string]any{"id": ids.New().String(), "name": "a", "body": body}})
		if err := id.Err(); err != nil {
			t.Fatal(err)
		}
	}
	largest := largestReply{new(atomic.Int64)}
	f.direct.AddHook(largest)
	letters := newConsumer(t, f.direct, inbox.NewMux(), inboxredis.Config{Group: groupName}).DeadLetters()
	if _, err := letters.Groups(t.Context(), inbox.Filter{Limit: 1}); err != nil {
		t.Fatal(err)
	}
	found, err := letters.List(t.Context(), inbox.Filter{Limit: 1000})
	if len(found) != small+large || err != nil {
		t.Errorf("%d letters, error %v", len(found), err)
	}
	if got := largest.bytes.Load(); got < size || got > 5*size+100_000 {
		t.Errorf("a page has %d bytes", got)
	}
}
