package main

import (
	"context"
	"errors"
	"os"
	"time"

	"github.com/holdfast-go/holdfast/internal/lab/load"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

func scaleWorkload() workload {
	return workload{scaleOnly, []part{
		{"messages", alone(benchScaleMessages)},
		{"requests", alone(benchScaleRequests)},
		{"partitions", alone(benchScalePartitions)},
		{"tables", alone(benchScaleTables)},
		{"shards", alone(benchScaleShards)},
		{"cluster", alone(benchScaleCluster)},
	}}
}

// alone runs a part on private servers, whose processor time can be read, and on none that another part has used.
func alone(part func(context.Context, *bench)) func(context.Context, *bench) {
	return func(ctx context.Context, b *bench) {
		for _, variable := range []string{testenv.PostgresVar, testenv.RedisVar, testenv.AMQPVar} {
			if os.Getenv(variable) != "" {
				check(errors.New("scale reads the processor time of servers of its own: unset " + variable))
			}
		}
		own := *b
		own.servers = servers{}
		defer func() {
			err := own.close()
			b.atEnd(func() error { return err })
		}()
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		part(ctx, &own)
	}
}

// scaleClients are enough to keep a server busy.
const scaleClients = 8

// driven has clients repeat an operation.
func (b *bench) driven(name string, op func(ctx context.Context, worker int) error) contender {
	return contender{name, func(ctx context.Context, length time.Duration) sample {
		watch := stopwatch{bench: b}
		watch.start()
		l, err := load.Drive(ctx, scaleClients, length, op)
		watch.stop()
		check(errors.Join(err, watch.err))
		return watch.sample(l.Done)
	}}
}

// only shows some figures of samples, by their place in sampleColumns.
func (t table) only(places ...int) table {
	for _, place := range places {
		t.columns = append(t.columns, sampleColumns[place])
	}
	all := t.contenders
	t.contenders = nil
	for _, c := range all {
		t.contenders = append(t.contenders, contender{c.name, func(ctx context.Context, length time.Duration) sample {
			whole := c.run(ctx, length)
			var some sample
			for _, place := range places {
				some = append(some, whole[place])
			}
			return some
		}})
	}
	return t
}
