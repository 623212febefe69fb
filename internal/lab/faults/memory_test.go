package faults_test

import (
	"context"
	"encoding/json"
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/lab/backlog"
	"github.com/holdfast-go/holdfast/internal/pgtest"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
)

// backlogJob is a backlog that a process of its own drains, whose memory nothing else uses.
type backlogJob struct {
	Database string
	Messages int64
}

// backlogReport holds the most memory in use in the first quarter of the messages and in the rest.
type backlogReport struct{ First, Rest backlog.Memory }

func backlogRole(ctx context.Context, text []byte) (any, error) {
	var j backlogJob
	if err := json.Unmarshal(text, &j); err != nil {
		return nil, err
	}
	pool, err := pgxpool.New(ctx, j.Database)
	if err != nil {
		return nil, err
	}
	defer pool.Close()
	var report backlogReport
	done, _, err := backlog.Drain(ctx, pool, j.Messages, func(done int64) {
		if done < j.Messages/4 {
			report.First.Raise()
		} else {
			report.Rest.Raise()
		}
	})
	if err == nil && done != j.Messages {
		err = fmt.Errorf("%d of %d messages were published", done, j.Messages)
	}
	return report, err
}

// A relay has no more in memory than its batches, however much lies in the table.
func TestBacklog_memoryIsBounded(t *testing.T) {
	t.Parallel()
	testenv.Nightly(t, "drains 100,000 messages")
	const n = 100_000
	url := testenv.Private(t, testenv.Postgres).URL()
	pool := pgtest.Pool(t, url, 10)
	store, err := outboxpgx.New(pool, outboxpgx.Config{})
	must(t, err)
	must(t, store.Migrate(t.Context()))
	must(t, backlog.Fill(t.Context(), pool, 1, n, backlog.Body(512)))
	var report backlogReport
	spawn(t, "backlog", backlogJob{url, n}).report(&report)
	const slack = 4 << 20
	for _, m := range []struct {
		name        string
		first, rest uint64
	}{{"heap", report.First.Heap, report.Rest.Heap}, {"live heap", report.First.Live, report.Rest.Live}} {
		t.Logf("%s: at most %d KiB in the first quarter, %d in the rest", m.name, m.first>>10, m.rest>>10)
		if m.first == 0 || m.rest > m.first*5/4+slack {
			t.Errorf("the %s grows from %d to %d KiB", m.name, m.first>>10, m.rest>>10)
		}
	}
}
