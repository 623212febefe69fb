package faults_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	amqp "github.com/rabbitmq/amqp091-go"
	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/idempotency"
	idempotencydriver "github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/idempotency/idempotencypgx"
	"github.com/holdfast-go/holdfast/idempotency/idempotencyredis"
	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/inboxamqp"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
	"github.com/holdfast-go/holdfast/inbox/inboxredis"
	"github.com/holdfast-go/holdfast/internal/ids"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/amqptest"
	"github.com/holdfast-go/holdfast/internal/testenv/pgtest"
	"github.com/holdfast-go/holdfast/internal/testenv/redistest"
	"github.com/holdfast-go/holdfast/modules/nats/inboxnats"
	"github.com/holdfast-go/holdfast/modules/nats/outboxnats"
	outboxdriver "github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/outboxamqp"
	"github.com/holdfast-go/holdfast/outbox/outboxredis"
	"github.com/holdfast-go/holdfast/txretry"
)

// inboxPoints are the points where a consumer is killed. The last two concern a message that fails: when its copy
// for the retry is confirmed, and when the attempt is recorded.
var inboxPoints = []string{"handler started", "effect written", "committed", "copy confirmed", "attempt noted"}

// orderedPoints are those of an ordered consumer: it delays a message that failed in the process.
var orderedPoints = inboxPoints[:3]

// maxCrashes is the consumers' MaxCrashes.
const maxCrashes = 3

// The kinds of messages, by the behaviour of their handler.
const (
	doWell = "well"
	doFail = "fail" // at the first attempt
	doKill = "kill" // kills the process
)

// event is the body of a message.
type event struct{ Do, Key string }

// inboxJob is a consumer between a broker and a database.
type inboxJob struct {
	Database, Broker string
	Crash            crash
	MaxCrashes       int
	Partitions       int // above 0 the consumer is ordered
}

// consumer is a consumer of inboxamqp, inboxredis or inboxnats.
type consumer interface {
	Setup(ctx context.Context) error
	Run(ctx context.Context) error
	DeadLetters() inbox.DeadLetters
	Stats(ctx context.Context) (inbox.Stats, error)
}

// consumer returns the consumer for the job's broker, and a function that closes its client.
func (j inboxJob) consumer(p inbox.Processor) (consumer, func(), error) {
	cfg := inbox.ConsumerConfig{
		Concurrency: 4, MaxCrashes: j.MaxCrashes, Ordered: j.Partitions > 0, Logger: quiet,
		Retry: inbox.RetryPolicy{MaxAttempts: 5, BaseDelay: 50 * time.Millisecond, MaxDelay: 200 * time.Millisecond},
	}
	if strings.HasPrefix(j.Broker, "amqp") {
		queue := inboxamqp.Queue{Name: destination, Partitions: j.Partitions}
		if j.Partitions > 0 {
			queue.Bindings = []inboxamqp.Binding{{Exchange: exchange, Key: destination}}
		}
		c, err := inboxamqp.NewConsumer(inboxamqp.Dial(j.Broker, amqp.Config{}), queue, p, cfg)
		return c, func() {}, err
	}
	if strings.HasPrefix(j.Broker, "nats") {
		conn, err := openNATS(j.Broker)
		if err != nil {
			return nil, nil, err
		}
		c, err := inboxnats.NewConsumer(conn, inboxnats.Stream{Name: destination, Partitions: j.Partitions}, p, cfg)
		return c, conn.Close, err
	}
	client, err := openRedis(j.Broker)
	if err != nil {
		return nil, nil, err
	}
	c, err := inboxredis.NewConsumer(client, inboxredis.Stream{Name: destination, Partitions: j.Partitions}, p, cfg)
	return c, func() { _ = client.Close() }, err
}

func inboxRole(ctx context.Context, text []byte) error {
	var j inboxJob
	if err := json.Unmarshal(text, &j); err != nil {
		return err
	}
	return j.run(ctx)
}

func (j inboxJob) run(ctx context.Context) error {
	pool, err := pgxpool.New(context.WithoutCancel(ctx), j.Database)
	if err != nil {
		return err
	}
	defer pool.Close()
	manager, err := txretry.New(pool, txretry.Config{Logger: quiet})
	if err != nil {
		return err
	}
	processor, err := inboxpgx.New(manager, destination, inboxpgx.Config{})
	if err != nil {
		return err
	}
	if err := inboxpgx.Handle(processor, destination, j.Crash.handle); err != nil {
		return err
	}
	c, end, err := j.consumer(&crashProcessor{processor, &crashLedger{processor.Ledger(), &j.Crash}, &j.Crash})
	if err != nil {
		return err
	}
	defer end()
	return c.Run(ctx)
}

func (c *crash) handle(ctx context.Context, tx pgx.Tx, e event) error {
	c.pass("handler started")
	m, _ := inbox.FromContext(ctx)
	if _, err := tx.Exec(ctx, `INSERT INTO effects (id, key) VALUES ($1, $2)`, m.ID, e.Key); err != nil {
		return err
	}
	c.pass("effect written")
	switch {
	case e.Do == doFail && m.Attempt == 1:
		return errors.New("fails once")
	case e.Do == doKill:
		killSelf()
	}
	return nil
}

// crashProcessor and its ledger kill the process at a point of the consumer's work.
type crashProcessor struct {
	inbox.Processor
	ledger driver.Ledger
	crash  *crash
}

func (p *crashProcessor) Ledger() driver.Ledger    { return p.ledger }
func (p *crashProcessor) Retention() time.Duration { return driver.DefaultRetention }

func (p *crashProcessor) Process(ctx context.Context, msgs []*inbox.Message) []error {
	results := p.Processor.Process(ctx, msgs)
	for _, err := range results {
		if err == nil {
			p.crash.pass("committed")
		}
	}
	return results
}

type crashLedger struct {
	driver.Ledger
	crash *crash
}

func (l *crashLedger) Pass(ctx context.Context, m *inbox.Message, after time.Duration) error {
	l.crash.pass("copy confirmed")
	err := l.Ledger.Pass(ctx, m, after)
	l.crash.pass("attempt noted")
	return err
}

// intake is a queue, the table of its effects, and the messages that were sent to it.
type intake struct {
	t       *testing.T
	job     inboxJob
	pool    *pgxpool.Pool
	look    consumer // for inspection, never run
	publish func(id uuid.UUID, key string, body []byte)
	sent    map[uuid.UUID]string
}

func newIntake(t *testing.T, broker string, partitions int) *intake {
	t.Helper()
	url := pgtest.URL(t)
	i := &intake{t: t, job: inboxJob{Database: url, Broker: broker, MaxCrashes: maxCrashes, Partitions: partitions}, pool: pgtest.Pool(t, url, 4), sent: map[uuid.UUID]string{}}
	manager, err := txretry.New(i.pool, txretry.Config{})
	must(t, err)
	store, err := inboxpgx.New(manager, destination, inboxpgx.Config{})
	must(t, err)
	must(t, store.Migrate(t.Context()))
	_, err = i.pool.Exec(t.Context(), `CREATE TABLE effects (n bigserial, id uuid NOT NULL, key text NOT NULL)`) // not unique: two effects must show
	must(t, err)
	var end func()
	i.look, end, err = i.job.consumer(inbox.NewMux())
	must(t, err)
	t.Cleanup(end)
	must(t, i.look.Setup(t.Context()))
	return i
}

func inboxOnRabbitMQ(t *testing.T) work {
	t.Helper()
	b := amqptest.New(t)
	i := newIntake(t, b.URL, 0)
	conn, err := amqp.Dial(b.URL)
	must(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	ch, err := conn.Channel()
	must(t, err)
	must(t, ch.Confirm(false))
	i.publish = func(id uuid.UUID, _ string, body []byte) {
		confirm, err := ch.PublishWithDeferredConfirm("", destination, true, false, amqp.Publishing{
			MessageId: id.String(), Type: destination, ContentType: "application/json", DeliveryMode: amqp.Persistent, Body: body,
		})
		must(t, err)
		if !confirm.Wait() {
			t.Fatal("the broker rejected a message")
		}
	}
	return i
}

func inboxOnRedis(t *testing.T) work {
	t.Helper()
	url := redistest.URL(t)
	client := redistest.Client(t, url)
	i := newIntake(t, url, 0)
	i.publish = func(id uuid.UUID, _ string, body []byte) {
		must(t, client.XAdd(t.Context(), &redis.XAddArgs{Stream: destination, Values: []any{
			"id", id.String(), "name", destination, "content-type", "application/json", "body", body,
		}}).Err())
	}
	return i
}

func inboxOnNATS(t *testing.T) work {
	t.Helper()
	url := testenv.Private(t, testenv.NATS).URL()
	i := newIntake(t, url, 0)
	i.by(publisherOnNATS(t, url, 0))
	return i
}

func publisherOnNATS(t *testing.T, url string, partitions int) readyPublisher {
	t.Helper()
	conn, err := openNATS(url)
	must(t, err)
	t.Cleanup(conn.Close)
	p, err := outboxnats.NewPublisher(conn, outboxnats.Config{Topic: destination, Partitions: map[string]int{destination: partitions}})
	must(t, err)
	return p
}

func (i *intake) send(kind string) {
	i.t.Helper()
	key := fmt.Sprintf("key-%d", len(i.sent)%6)
	body, err := json.Marshal(event{kind, key})
	must(i.t, err)
	id := ids.New()
	i.publish(id, key, body)
	i.sent[id] = kind
}

func (i *intake) prepare() {
	i.t.Helper()
	for k := range 20 {
		i.send([]string{doWell, doFail}[k%2])
	}
}

func (i *intake) spawn(c crash) *child {
	job := i.job
	job.Crash = c
	return spawn(i.t, "inbox", job)
}

// finish processes the remaining messages. Then each message has taken effect once.
func (i *intake) finish() {
	i.t.Helper()
	stop := beside(i.t, i.job.run)
	testenv.Eventually(i.t, i.settled)
	stop()
	i.verify()
	if n := len(i.letters()); n > 0 {
		i.t.Errorf("%d dead letters", n)
	}
}

func (i *intake) effects() (map[uuid.UUID]int, error) {
	rows, _ := i.pool.Query(i.t.Context(), `SELECT id, count(*) FROM effects GROUP BY 1`) // ForEachRow returns its error
	found := map[uuid.UUID]int{}
	var id uuid.UUID
	var n int
	_, err := pgx.ForEachRow(rows, []any{&id, &n}, func() error {
		found[id] = n
		return nil
	})
	return found, err
}

// settled returns an error until all messages except killers have taken effect and none waits. The counts of retrying
// messages do not matter: on RabbitMQ a killed process may leave a note in them for an hour.
func (i *intake) settled() error {
	found, err := i.effects()
	if err != nil {
		return err
	}
	for id, kind := range i.sent {
		if kind != doKill && found[id] == 0 {
			return fmt.Errorf("a message that does %s has not taken effect", kind)
		}
	}
	stats, err := i.look.Stats(i.t.Context())
	if err == nil && stats.Waiting > 0 {
		err = fmt.Errorf("%d messages wait", stats.Waiting)
	}
	return err
}

// verify fails the test unless each message except killers took effect once.
func (i *intake) verify() {
	i.t.Helper()
	found, err := i.effects()
	must(i.t, err)
	for id, kind := range i.sent {
		want := 1
		if kind == doKill {
			want = 0
		}
		if found[id] != want {
			i.t.Errorf("message %s, which does %s, took effect %d times, want %d", id, kind, found[id], want)
		}
	}
	if i.job.Partitions == 0 {
		return
	}
	var disorder int // ids grow in the order of sending
	must(i.t, i.pool.QueryRow(i.t.Context(), `SELECT count(*) FROM effects a JOIN effects b ON a.key = b.key AND a.n < b.n AND a.id > b.id`).Scan(&disorder))
	if disorder > 0 {
		i.t.Errorf("%d pairs of messages of one key took effect in the wrong order", disorder)
	}
}

// partitionsOnRabbitMQ is an ordered consumer of three partitions, which the publisher of package outboxamqp chooses.
func partitionsOnRabbitMQ(t *testing.T) work {
	t.Helper()
	b := amqptest.New(t)
	p, err := outboxamqp.NewPublisher(outboxamqp.Dial(b.URL, amqp.Config{}), outboxamqp.Config{Exchange: exchange, Logger: quiet})
	must(t, err)
	return newPartitions(t, b.URL, p)
}

func partitionsOnRedis(t *testing.T) work {
	t.Helper()
	url := redistest.URL(t)
	p, err := outboxredis.NewPublisher(redistest.Client(t, url), outboxredis.Config{Stream: destination, Partitions: map[string]int{destination: partitions}})
	must(t, err)
	return newPartitions(t, url, p)
}

func partitionsOnNATS(t *testing.T) work {
	t.Helper()
	url := testenv.Private(t, testenv.NATS).URL()
	return newPartitions(t, url, publisherOnNATS(t, url, partitions))
}

const (
	partitions = 3
	exchange   = "amq.topic"
)

func newPartitions(t *testing.T, broker string, p readyPublisher) *intake {
	t.Helper()
	i := newIntake(t, broker, partitions)
	i.by(p)
	return i
}

// by makes a publisher send the messages.
func (i *intake) by(p readyPublisher) {
	t := i.t
	t.Helper()
	if runs, ok := p.(interface{ Run(context.Context) error }); ok {
		beside(t, runs.Run)
	}
	testenv.Eventually(t, func() error { return p.Ready(t.Context()) })
	i.publish = func(id uuid.UUID, key string, body []byte) {
		confirmed := make(chan error, 1)
		m := outboxdriver.Message{ID: id, Name: destination, Key: key, Body: body, ContentType: "application/json", CreatedAt: time.Now()}
		p.Publish(t.Context(), m, func(err error) { confirmed <- err })
		must(t, <-confirmed)
	}
}

func (i *intake) letters() (all []inbox.DeadLetter) {
	i.t.Helper()
	testenv.Eventually(i.t, func() (err error) { // a busy queue still holds the letters of an earlier list
		all, err = i.look.DeadLetters().List(i.t.Context(), inbox.Filter{Limit: 1000})
		return err
	})
	return all
}

// The gates that a service can have in front of its records in Postgres.
const (
	redisGate    = "Redis"
	failingGate  = "failing" // always fails, so the records decide
	postgresGate = "Postgres"
	noGate       = "none"
)

// idempotencyPoints are the points where a service is killed: in the transaction of a request, after its commit,
// and when the gate has the answer, too.
var idempotencyPoints = []string{"effect written", "committed", "answered"}

// killLease is how long the key of a killed service stays in use.
const killLease = 500 * time.Millisecond

// serviceJob is a service on Redis and Postgres, and one request to it.
type serviceJob struct {
	Database, Redis, Gate string
	Key                   idempotency.Key
	Crash                 crash
}

func migrateService(t testing.TB, url string) {
	t.Helper()
	pool := pgtest.Pool(t, url, 2)
	store, err := serviceStore(pool, nil, noGate, 0)
	must(t, err)
	must(t, store.Migrate(t.Context()))
	_, err = pool.Exec(t.Context(), `CREATE TABLE effects (id bigserial PRIMARY KEY, key text NOT NULL)`)
	must(t, err)
}

// serviceStore returns records in Postgres behind a gate.
func serviceStore(pool *pgxpool.Pool, front idempotencydriver.Store, gate string, lease time.Duration) (*idempotencypgx.Store, error) {
	manager, err := txretry.New(pool, txretry.Config{Logger: quiet})
	if err != nil {
		return nil, err
	}
	cfg := idempotencypgx.Config{}
	switch gate {
	case postgresGate:
		cfg.Lease = lease
	case redisGate:
		cfg.Gate = front
	case failingGate:
		cfg.Gate = deadGate{front}
	}
	return idempotencypgx.New(manager, cfg)
}

type deadGate struct{ idempotencydriver.Store }

func (deadGate) Begin(context.Context, idempotencydriver.Claim) (idempotencydriver.BeginResult, error) {
	return idempotencydriver.BeginResult{}, errors.New("the gate is down")
}

// open returns the handler of the service, and a function that closes its clients.
func (j serviceJob) open(ctx context.Context) (http.Handler, func(), error) {
	client, err := openRedis(j.Redis)
	if err != nil {
		return nil, nil, err
	}
	pool, err := pgxpool.New(ctx, j.Database)
	if err != nil {
		return nil, nil, err
	}
	front, err := idempotencyredis.New(client, idempotencyredis.Config{Lease: killLease})
	if err != nil {
		return nil, nil, err
	}
	store, err := serviceStore(pool, front, j.Gate, killLease)
	if err != nil {
		return nil, nil, err
	}
	protect, err := idempotency.NewMiddleware(store, idempotency.UnsafeGlobalScope, idempotency.MiddlewareConfig{Logger: quiet})
	if err != nil {
		return nil, nil, err
	}
	crash := &j.Crash
	buy := store.Handler(func(ctx context.Context, tx pgx.Tx, r *http.Request) (idempotency.Response, error) {
		var id int64
		err := tx.QueryRow(ctx, `INSERT INTO effects (key) VALUES ($1) RETURNING id`, r.Header.Get(idempotency.Header)).Scan(&id)
		if err != nil {
			return idempotency.Response{}, err
		}
		crash.pass("effect written")
		return idempotency.JSON(http.StatusCreated, fmt.Sprint("effect ", id))
	})
	handler := protect(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		buy.ServeHTTP(w, r)
		crash.pass("committed")
	}))
	return handler, func() {
		pool.Close()
		_ = client.Close()
	}, nil
}

// idempotencyRole sends one request to a service, and dies on the way.
func idempotencyRole(ctx context.Context, text []byte) error {
	var j serviceJob
	if err := json.Unmarshal(text, &j); err != nil {
		return err
	}
	handler, end, err := j.open(ctx)
	if err != nil {
		return err
	}
	defer end()
	j.Crash.After = 0 // there is only one request
	code, body := post(handler, j.Key)
	j.Crash.pass("answered")
	return fmt.Errorf("answer %d %s", code, body)
}

func post(handler http.Handler, key idempotency.Key) (code int, body string) {
	r := httptest.NewRequest(http.MethodPost, "/effects", nil)
	r.Header.Set(idempotency.Header, string(key))
	rec := httptest.NewRecorder()
	handler.ServeHTTP(rec, r)
	return rec.Code, rec.Body.String()
}

// service is a work: one request, which is sent first to a process that is killed and then to this process.
type service struct {
	t       *testing.T
	job     serviceJob
	pool    *pgxpool.Pool
	handler http.Handler
}

func idempotencyBehind(gate string) func(*testing.T) work {
	return func(t *testing.T) work {
		s := &service{t: t, job: serviceJob{Database: pgtest.URL(t), Redis: redistest.URL(t), Gate: gate}}
		migrateService(t, s.job.Database)
		s.pool = pgtest.Pool(t, s.job.Database, 2)
		var end func()
		var err error
		s.handler, end, err = s.job.open(t.Context())
		must(t, err)
		t.Cleanup(end)
		return s
	}
}

func (s *service) prepare() { s.job.Key = idempotency.NewKey() }

func (s *service) spawn(c crash) *child {
	job := s.job
	job.Crash = crash{Point: c.Point}
	return spawn(s.t, "idempotency", job)
}

// finish is the client that repeats its request. The request has one effect, and one answer from now on.
func (s *service) finish() {
	s.t.Helper()
	answer := s.answer()
	if again := s.answer(); again != answer {
		s.t.Errorf("answered %s, then %s", answer, again)
	}
	var n int
	var id int64
	must(s.t, s.pool.QueryRow(s.t.Context(), `SELECT count(*), max(id) FROM effects WHERE key = $1`, string(s.job.Key)).Scan(&n, &id))
	if n != 1 || answer != fmt.Sprintf("%q", fmt.Sprint("effect ", id)) {
		s.t.Errorf("%d effects, the last one %d; answer %s", n, id, answer)
	}
}

// answer repeats the request until it gets an answer. The key is in use until its lease ends.
func (s *service) answer() (body string) {
	s.t.Helper()
	testenv.Eventually(s.t, func() error {
		var code int
		if code, body = post(s.handler, s.job.Key); code != http.StatusCreated {
			return fmt.Errorf("answer %d %s", code, body)
		}
		return nil
	})
	return body
}
