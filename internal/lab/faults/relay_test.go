package faults_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	amqp "github.com/rabbitmq/amqp091-go"
	"go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"

	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/outboxamqp"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
)

const (
	// batch is the relays' BatchSize.
	batch = 50
	// inFlight is how many messages of one relay are claimed and not settled, at most.
	inFlight = 3 * batch
	// maxBody is the largest body the publisher sends.
	maxBody = 16 << 20
)

// relayJob is a relay between a database and a broker.
type relayJob struct {
	Database, Broker string
	// Patience is the PublishTimeout; the lease is twice that, and the delay after a failed attempt a tenth.
	// 0 means the relay's defaults in everything.
	Patience time.Duration
	// MaxAttempts as in outbox.RelayConfig.
	MaxAttempts int

	outcomes   *outcomes                   // what is told of the broker's answers; nil: nothing is
	transports map[string]driver.Publisher // beside the broker, which is ""
}

// shutdown is the relay's ShutdownTimeout.
func (j relayJob) shutdown() time.Duration {
	if j.Patience == 0 {
		return 15 * time.Second
	}
	return 2 * j.Patience
}

func (j relayJob) config() outbox.RelayConfig {
	if j.Patience == 0 {
		return outbox.RelayConfig{}
	}
	return outbox.RelayConfig{
		BatchSize: batch, PollInterval: 200 * time.Millisecond,
		PublishTimeout: j.Patience, LeaseTTL: 2 * j.Patience, ShutdownTimeout: j.shutdown(),
		Retry: outbox.RetryPolicy{MaxAttempts: j.MaxAttempts, BaseDelay: j.Patience / 10, MaxDelay: j.Patience},
	}
}

// relayReport is what a relay did.
type relayReport struct{ Published, Failed, Stale int64 }

func relayRole(ctx context.Context, job []byte, ready func()) (any, error) {
	var j relayJob
	if err := json.Unmarshal(job, &j); err != nil {
		return nil, err
	}
	return j.run(ctx, ready)
}

// run relays until ctx ends.
func (j relayJob) run(ctx context.Context, ready func()) (relayReport, error) {
	pool, err := pgxpool.New(ctx, j.Database)
	if err != nil {
		return relayReport{}, err
	}
	defer pool.Close()
	publisher, err := outboxamqp.NewPublisher(outboxamqp.Dial(j.Broker, amqp.Config{}), outboxamqp.Config{
		Exchange: exchange, Logger: quiet,
		Timeout: j.Patience * 4 / 3, // a confirm has half as long again: as long as a lease
	})
	if err != nil {
		return relayReport{}, err
	}
	if j.outcomes != nil {
		return j.relay(ctx, pool, watched{publisher, j.outcomes}, ready)
	}
	return j.relay(ctx, pool, publisher, ready)
}

// relay runs a relay, and with it what its publisher needs.
func (j relayJob) relay(ctx context.Context, pool *pgxpool.Pool, publisher driver.Publisher, ready func()) (relayReport, error) {
	store, err := outboxpgx.New(pool, outboxpgx.Config{Logger: quiet})
	if err != nil {
		return relayReport{}, err
	}
	reader := metric.NewManualReader()
	cfg := j.config()
	cfg.Logger, cfg.Transports, cfg.MeterProvider = quiet, j.transports, metric.NewMeterProvider(metric.WithReader(reader))
	relay, err := outbox.NewRelay(store, publisher, cfg)
	if err != nil {
		return relayReport{}, err
	}
	asked := make(chan time.Time, 1)
	context.AfterFunc(ctx, func() { asked <- time.Now() })
	ready()
	err = relay.Run(ctx)
	if took := time.Since(<-asked); took > j.shutdown()+10*time.Second {
		err = errors.Join(err, fmt.Errorf("the relay ended after %v, it has %v", took, j.shutdown()))
	}
	if err != nil {
		return relayReport{}, err
	}
	return reportOf(ctx, reader)
}

func reportOf(ctx context.Context, reader *metric.ManualReader) (relayReport, error) {
	var all metricdata.ResourceMetrics
	if err := reader.Collect(context.WithoutCancel(ctx), &all); err != nil {
		return relayReport{}, err
	}
	sums := map[string]int64{}
	for _, scope := range all.ScopeMetrics {
		for _, m := range scope.Metrics {
			if sum, ok := m.Data.(metricdata.Sum[int64]); ok {
				for _, point := range sum.DataPoints {
					sums[m.Name] += point.Value
				}
			}
		}
	}
	return relayReport{sums["holdfast.outbox.published"], sums["holdfast.outbox.failed"], sums["holdfast.outbox.stale_leases"]}, nil
}
