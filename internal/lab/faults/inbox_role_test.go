package faults_test

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"os"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/inboxamqp"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
	"github.com/holdfast-go/holdfast/txretry"
)

const (
	inboxName  = "faults.event"
	inboxQueue = "inbox"
)

// inboxEvent is the body of a message, and says how its handler behaves.
type inboxEvent struct {
	Do string `json:"do"`
	// Key is the message's ordering key, and N its number among those of the key.
	Key string `json:"key,omitempty"`
	N   int    `json:"n,omitempty"`
	// Pad makes the body as large as usual.
	Pad string `json:"pad"`
}

// What a handler can do.
const (
	doWell  = ""
	doFlaky = "flaky" // fails twice
	doFail  = "fail"
	doPanic = "panic"
	doDead  = "dead" // fails for good
	doKill  = "kill" // ends the process
	doCut   = "cut"  // ends its connection to the database
)

// inboxJob is a consumer.
type inboxJob struct {
	Database, Broker   string
	Concurrency, Batch int
	Ordered            bool
	// Crash is the place where the process ends, at the After'th time it comes by.
	Crash string
	After int64
	// MaxCrashes is the consumer's; 0 means maxCrashes.
	MaxCrashes int
	// Heartbeat is that of the connections to RabbitMQ; 0 means 2 s.
	Heartbeat time.Duration
}

// crashPoints are the places, in the order of a message's way.
var crashPoints = []string{
	"handler begun", "effect written", "committed", "copy confirmed", "attempt noted",
}

const (
	inboxRetries = 4
	maxCrashes   = 3
)

func (j inboxJob) config() inboxamqp.Config {
	return inboxamqp.Config{Timeout: 5 * time.Second, ConsumerConfig: inbox.ConsumerConfig{
		Concurrency: j.Concurrency, Batch: j.Batch, Ordered: j.Ordered, MaxCrashes: cmp.Or(j.MaxCrashes, maxCrashes),
		Retry:  inbox.RetryPolicy{MaxAttempts: inboxRetries + 1, BaseDelay: 50 * time.Millisecond, MaxDelay: 200 * time.Millisecond},
		Logger: quiet,
	}}
}

func (j inboxJob) dial(context.Context) (*amqp.Connection, error) {
	return amqp.DialConfig(j.Broker, amqp.Config{Heartbeat: cmp.Or(j.Heartbeat, 2*time.Second)})
}

func inboxRole(ctx context.Context, job []byte, ready func()) (any, error) {
	var j inboxJob
	if err := json.Unmarshal(job, &j); err != nil {
		return nil, err
	}
	return struct{}{}, j.run(ctx, ready)
}

// run consumes until ctx ends.
func (j inboxJob) run(ctx context.Context, ready func()) error {
	poolConfig, err := pgxpool.ParseConfig(j.Database)
	if err != nil {
		return err
	}
	poolConfig.MaxConns = int32(j.Concurrency) + 4
	pool, err := pgxpool.NewWithConfig(context.WithoutCancel(ctx), poolConfig)
	if err != nil {
		return err
	}
	defer pool.Close()
	manager, err := txretry.New(pool, txretry.Config{Logger: quiet, CommitTimeout: 5 * time.Second})
	if err != nil {
		return err
	}
	c := &crash{at: j.Crash}
	c.left.Store(j.After)
	processor, err := inboxpgx.New(manager, "faults", inboxpgx.Config{
		ByName: map[string]inboxpgx.HandlerConfig{inboxName: {Timeout: 10 * time.Second}},
	})
	if err != nil {
		return err
	}
	if err := inboxpgx.Handle(processor, inboxName, c.handle); err != nil {
		return err
	}
	consumer, closeClient, err := j.consumer(&crashProcessor{processor, &crashLedger{processor.Ledger(), c}, c}, 5*time.Second)
	if err != nil {
		return err
	}
	defer closeClient()
	ready()
	return consumer.Run(ctx)
}

// crash ends the process as a power cut would.
type crash struct {
	at   string
	left atomic.Int64
}

func (c *crash) pass(point string) {
	if point == c.at && c.left.Add(-1) == 0 {
		killSelf()
	}
}

func killSelf() {
	_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
	select {} // it comes at once, but perhaps to another thread
}

var errFaults = errors.New("as the message wants it")

func (c *crash) handle(ctx context.Context, tx pgx.Tx, e inboxEvent) error {
	c.pass("handler begun")
	m, _ := inbox.FromContext(ctx)
	if _, err := tx.Exec(ctx, `INSERT INTO inbox_effects (message_id, key, n) VALUES ($1, $2, $3)`, m.ID, e.Key, e.N); err != nil {
		return err
	}
	c.pass("effect written")
	switch e.Do {
	case doFlaky:
		if m.Attempt <= 2 {
			return errFaults
		}
	case doFail:
		return errFaults
	case doPanic:
		panic(errFaults)
	case doDead:
		return inbox.Unrecoverable(errFaults)
	case doKill:
		killSelf()
	case doCut:
		_, err := tx.Exec(ctx, `SELECT pg_terminate_backend(pg_backend_pid())`)
		return err
	}
	return nil
}

// crashProcessor and its ledger end the process at what the consumer does.
type crashProcessor struct {
	next   inbox.Processor
	ledger *crashLedger
	c      *crash
}

func (p *crashProcessor) Ledger() driver.Ledger    { return p.ledger }
func (p *crashProcessor) Retention() time.Duration { return driver.DefaultRetention }

func (p *crashProcessor) Process(ctx context.Context, msgs []*inbox.Message) []error {
	results := p.next.Process(ctx, msgs)
	for _, err := range results {
		if err == nil {
			p.c.pass("committed")
		}
	}
	return results
}

type crashLedger struct {
	driver.Ledger
	c *crash
}

func (l *crashLedger) Pass(ctx context.Context, m *inbox.Message) error {
	l.c.pass("copy confirmed")
	err := l.Ledger.Pass(ctx, m)
	l.c.pass("attempt noted")
	return err
}
