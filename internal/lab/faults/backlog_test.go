package faults_test

import (
	"context"
	"encoding/json"
	"errors"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/lab/backlog"
)

// drainAll has a relay publish exactly n messages and returns how long that took: see backlog.Drain.
func drainAll(ctx context.Context, pool *pgxpool.Pool, n int64, during func(done int64)) (time.Duration, error) {
	done, took, err := backlog.Drain(ctx, pool, n, during)
	if err == nil && done != n {
		err = errors.New("not every message was published once")
	}
	return took, err
}

// backlogJob is a backlog to drain in a process of its own, whose memory nobody else uses.
type backlogJob struct {
	Database string
	Messages int64
}

// backlogReport holds the most memory in use in the first quarter of the messages and in the rest.
type backlogReport struct {
	Seconds     float64
	First, Rest backlog.Memory
}

func backlogRole(ctx context.Context, job []byte, ready func()) (any, error) {
	var j backlogJob
	if err := json.Unmarshal(job, &j); err != nil {
		return nil, err
	}
	pool, err := pgxpool.New(ctx, j.Database)
	if err != nil {
		return nil, err
	}
	defer pool.Close()
	ready()
	var report backlogReport
	took, err := drainAll(ctx, pool, j.Messages, func(done int64) {
		if done < j.Messages/4 {
			report.First.Raise()
		} else {
			report.Rest.Raise()
		}
	})
	report.Seconds = took.Seconds()
	return report, err
}
