package shop

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/internal/lab/load"
	"github.com/holdfast-go/holdfast/internal/runloop"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/amqptest"
	"github.com/holdfast-go/holdfast/internal/testenv/pgtest"
	"github.com/holdfast-go/holdfast/internal/testenv/redistest"
)

const (
	// hallEvents is how many events the clients share. Holds of one event wait for each other.
	hallEvents = 50
	// seatsPerSecond is more than any shop here can sell.
	seatsPerSecond = 5000
	// longestAnswer exceeds any answer of a shop.
	longestAnswer = 1 << 20
	// answerTimeout exceeds the shop's own time limit.
	answerTimeout = 70 * time.Second
)

// The answers to clients who got their seat, and to clients who came too late.
const (
	AnswerHeld  = "201"
	AnswerTaken = "409 SEATS_UNAVAILABLE"
)

// Answers counts the answers to clients, by status and code.
type Answers map[string]int

// Add adds the counts of more.
func (a Answers) Add(more Answers) {
	for kind, n := range more {
		a[kind] += n
	}
}

// Errors counts the answers that a shop must not give.
func (a Answers) Errors() (n int) {
	for kind, times := range a {
		status, _, _ := strings.Cut(kind, " ")
		if !strings.HasPrefix(status, "2") && !slices.Contains([]string{"409", "429", "503"}, status) {
			n += times
		}
	}
	return n
}

// Unavailable counts the 503 answers: the client should try again.
func (a Answers) Unavailable() (n int) {
	for kind, times := range a {
		if status, _, _ := strings.Cut(kind, " "); status == "503" {
			n += times
		}
	}
	return n
}

// All counts all answers.
func (a Answers) All() (n int) {
	for _, times := range a {
		n += times
	}
	return n
}

func (a Answers) String() string {
	var parts []string
	for _, kind := range slices.Sorted(maps.Keys(a)) {
		parts = append(parts, fmt.Sprintf("%d × %s", a[kind], kind))
	}
	return strings.Join(parts, ", ")
}

// Hall is the clients' view of a shop with seats to hold. Its methods may be called from many goroutines.
type Hall struct {
	url    string
	http   *http.Client
	events []hallEvent
	next   atomic.Int64

	mu   sync.Mutex
	told Answers
}

type hallEvent struct {
	id    string
	seats []string
}

// EnoughSeats returns more seats than any shop here can sell in that time.
func EnoughSeats(length time.Duration) int { return int(seatsPerSecond * length.Seconds()) }

// OpenHall creates events with the given total of seats, for the given number of concurrent clients.
func OpenHall(ctx context.Context, url string, clients, seats int) (*Hall, error) {
	h := &Hall{
		url: url, told: Answers{},
		http: &http.Client{Timeout: answerTimeout, Transport: &http.Transport{MaxIdleConnsPerHost: clients}},
	}
	for range hallEvents {
		e, err := h.newEvent(ctx, max(1, seats/hallEvents))
		if err != nil {
			h.Close()
			return nil, err
		}
		h.events = append(h.events, e)
	}
	return h, nil
}

// Close drops the connections of the clients.
func (h *Hall) Close() { h.http.CloseIdleConnections() }

func (h *Hall) newEvent(ctx context.Context, seats int) (hallEvent, error) {
	var e struct {
		ID  string
		Map []struct{ Seat string }
	}
	kind, err := h.post(ctx, "owner", "/api/events", fmt.Appendf(nil, `{"name":"Concert","seats":%d}`, seats), &e)
	if err == nil && kind != "201" {
		err = fmt.Errorf("an event with %d seats: %s", seats, kind)
	}
	if err != nil {
		return hallEvent{}, err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, h.url+"/api/events/"+e.ID, nil)
	if err != nil {
		return hallEvent{}, err
	}
	if _, err := h.send(req, &e); err != nil {
		return hallEvent{}, err
	}
	event := hallEvent{id: e.ID}
	for _, s := range e.Map {
		event.seats = append(event.seats, s.Seat)
	}
	return event, nil
}

// Hold requests a free seat, and every tenth time the seat that the previous client requested.
func (h *Hall) Hold(ctx context.Context, client int) error {
	event, place := h.turn()
	if place >= len(event.seats) {
		return fmt.Errorf("all %d seats are held", hallEvents*len(event.seats))
	}
	_, kind := h.hold(ctx, client, event, place)
	if kind != AnswerHeld && kind != AnswerTaken {
		return load.ErrGaveUp
	}
	return nil
}

// Visit is Hold in a hall whose seats become free again: every fourth client cancels, and the holds of the
// others expire. After the last seat comes the first.
func (h *Hall) Visit(ctx context.Context, client int) error {
	event, place := h.turn()
	id, kind := h.hold(ctx, client, event, place%len(event.seats))
	if kind == AnswerHeld && place%4 == 0 {
		kind = h.count(h.post(ctx, userOf(client), "/api/reservations/"+id+"/cancel", []byte("{}"), nil))
		if kind == "200" {
			return nil
		}
	}
	if kind != AnswerHeld && kind != AnswerTaken {
		return load.ErrGaveUp
	}
	return nil
}

// turn returns the event and the place of the next client.
func (h *Hall) turn() (event hallEvent, place int) {
	n := int(h.next.Add(1))
	n -= n / 10
	return h.events[n%hallEvents], n / hallEvents
}

func (h *Hall) hold(ctx context.Context, client int, event hallEvent, place int) (id, kind string) {
	body := fmt.Appendf(nil, `{"event_id":%q,"seats":[%q]}`, event.id, event.seats[place])
	var made struct{ ID string }
	kind = h.count(h.post(ctx, userOf(client), "/api/reservations", body, &made))
	return made.ID, kind
}

func userOf(client int) string { return "client-" + strconv.Itoa(client) }

// count records an answer, or a missing answer.
func (h *Hall) count(kind string, err error) string {
	if err != nil {
		kind = "no answer"
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.told[kind]++
	return kind
}

// TakeAnswers returns the answers to clients since the last call.
func (h *Hall) TakeAnswers() Answers {
	h.mu.Lock()
	defer h.mu.Unlock()
	told := h.told
	h.told = Answers{}
	return told
}

func (h *Hall) post(ctx context.Context, user, path string, body []byte, into any) (kind string, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, h.url+path, bytes.NewReader(body))
	if err != nil {
		return "", err
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("X-Mock-User-Id", user)
	req.Header.Set(idempotency.Header, string(idempotency.NewKey()))
	return h.send(req, into)
}

// send returns the status of the answer, followed by the code of a problem. A body that is not a problem is
// decoded into into.
func (h *Hall) send(req *http.Request, into any) (kind string, err error) {
	resp, err := h.http.Do(req)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, longestAnswer))
	if err != nil {
		return "", err
	}
	kind = strconv.Itoa(resp.StatusCode)
	if resp.StatusCode >= http.StatusBadRequest {
		var problem struct{ Code string }
		_ = json.Unmarshal(body, &problem) // then it has no code
		return strings.TrimSpace(kind + " " + problem.Code), nil
	}
	if into != nil {
		err = json.Unmarshal(body, into)
	}
	return kind, err
}

// Place is where shops run one after the other: the program, and its own servers, which each run finds empty.
// Postgres records commit timestamps, which is off by default.
type Place struct {
	Postgres, Redis, RabbitMQ *testenv.Server
	runs                      int
}

// Open starts the servers and builds the program. The caller must Close the place. broker are additional lines
// of rabbitmq.conf.
func Open(ctx context.Context, broker ...string) (_ *Place, err error) {
	p := &Place{}
	defer func() {
		if err != nil {
			err = errors.Join(err, p.Close())
		}
	}()
	for _, server := range []struct {
		into  **testenv.Server
		kind  testenv.Kind
		extra []string
	}{
		{&p.Postgres, testenv.Postgres, []string{"-c", "track_commit_timestamp=on"}},
		{&p.Redis, testenv.Redis, nil},
		{&p.RabbitMQ, testenv.RabbitMQ, broker},
	} {
		if *server.into, err = testenv.Launch(ctx, server.kind, server.extra...); err != nil {
			return nil, err
		}
	}
	_, err = Binary()
	return p, err
}

// Close ends the servers and removes the program.
func (p *Place) Close() error {
	Remove()
	var errs []error
	for _, s := range slices.Backward([]*testenv.Server{p.Postgres, p.Redis, p.RabbitMQ}) {
		if s != nil {
			errs = append(errs, s.Close())
		}
	}
	return errors.Join(errs...)
}

// Data is the data of one run on the servers.
type Data struct {
	Conn    *pgx.Conn
	Servers Servers
	place   *Place
	name    string
}

// NewData creates a database and a virtual host, and empties Redis.
func (p *Place) NewData(ctx context.Context) (*Data, error) {
	opts, err := redis.ParseURL(p.Redis.URL())
	if err != nil {
		return nil, err
	}
	client := redis.NewClient(opts)
	err = errors.Join(client.FlushAll(ctx).Err(), client.Close())
	if err != nil {
		return nil, err
	}
	p.runs++
	d := &Data{place: p, name: fmt.Sprintf("shop_%d", p.runs)}
	if err := p.exec(ctx, "CREATE DATABASE "+d.name); err != nil {
		return nil, err
	}
	if err := testenv.AddVHost(ctx, p.RabbitMQ.AdminURL(), d.name); err != nil {
		return nil, err
	}
	u, err := url.Parse(p.Postgres.URL())
	if err != nil {
		return nil, err
	}
	u.Path = d.name
	d.Servers = Servers{Database: u.String(), Redis: p.Redis.URL(), Broker: p.RabbitMQ.URL() + d.name}
	d.Conn, err = pgx.Connect(ctx, u.String())
	return d, err
}

// exec runs a statement outside the databases of the runs.
func (p *Place) exec(ctx context.Context, sql string) error {
	conn, err := pgx.Connect(ctx, p.Postgres.URL())
	if err != nil {
		return err
	}
	_, err = conn.Exec(ctx, sql)
	return errors.Join(err, conn.Close(ctx))
}

// Vacuum brings the tables into the state that they have in a shop that has run for a long time.
func (d *Data) Vacuum(ctx context.Context) error {
	_, err := d.Conn.Exec(ctx, "VACUUM ANALYZE")
	return err
}

// Drop removes the database and the virtual host.
func (d *Data) Drop() error {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	return errors.Join(d.Conn.Close(ctx), d.place.exec(ctx, "DROP DATABASE "+d.name+" WITH (FORCE)"),
		testenv.RemoveVHost(ctx, d.place.RabbitMQ.AdminURL(), d.name))
}

// learnPatience is how long a read model may take to show everything committed.
const learnPatience = 2 * time.Minute

// UntilLearnt waits until the read model shows every reservation.
func (d *Data) UntilLearnt(ctx context.Context) error {
	for patience := time.Now().Add(learnPatience); ; {
		var missing int
		err := d.Conn.QueryRow(ctx, "SELECT (SELECT count(*) FROM reservations) - (SELECT count(*) FROM reservation_states)").Scan(&missing)
		if err != nil || missing == 0 {
			return err
		}
		if time.Now().After(patience) {
			return fmt.Errorf("the read model lacks %d reservations", missing)
		}
		if err := runloop.Sleep(ctx, 50*time.Millisecond); err != nil {
			return err
		}
	}
}

// Now returns the time of the database's clock.
func (d *Data) Now(ctx context.Context) (now time.Time, err error) {
	err = d.Conn.QueryRow(ctx, "SELECT clock_timestamp()").Scan(&now)
	return now, err
}

const oversoldSQL = `
SELECT count(*) FROM (
	SELECT event_id, unnest(seats) FROM reservations WHERE status IN ('held', 'confirmed') GROUP BY 1, 2 HAVING count(*) > 1
) AS twice`

// Audit counts the seats that more than one reservation has. It fails if there are fewer reservations than
// were confirmed to clients.
func (d *Data) Audit(ctx context.Context, told int) (oversold int, err error) {
	var reservations int
	err = d.Conn.QueryRow(ctx, "SELECT ("+oversoldSQL+"), (SELECT count(*) FROM reservations)").Scan(&oversold, &reservations)
	if err == nil && reservations < told {
		err = fmt.Errorf("%d reservations, but %d were confirmed to clients", reservations, told)
	}
	return oversold, err
}

// A reservation and its row in the read model are written once each here, so xmin is the committing
// transaction.
const learntSQL = `
SELECT percentile_disc(ARRAY[0.5, 0.99]) WITHIN GROUP (ORDER BY
	1000 * extract(epoch FROM pg_xact_commit_timestamp(s.xmin) - pg_xact_commit_timestamp(r.xmin))::double precision)
FROM reservations r JOIN reservation_states s ON s.reservation_id = r.id
WHERE r.created_at >= $1`

// Learnt returns p50 and p99, in milliseconds by the database's clock, of the time from the commit of a
// reservation to the commit that shows it in the read model. It covers all reservations since then.
func (d *Data) Learnt(ctx context.Context, since time.Time) ([2]float64, error) {
	var waits []float64
	err := d.Conn.QueryRow(ctx, learntSQL, since).Scan(&waits)
	if err == nil && len(waits) != 2 {
		err = fmt.Errorf("no reservation since %v", since)
	}
	if err != nil {
		return [2]float64{}, err
	}
	return [2]float64(waits), nil
}

// Servers are the addresses of a shop's servers.
type Servers struct{ Database, Redis, Broker string }

// Shared returns an isolated part of each shared server.
func Shared(t testing.TB) Servers {
	t.Helper()
	return Servers{pgtest.URL(t), redistest.URL(t), amqptest.New(t).URL}
}

// Env returns the environment variables with these addresses for a shop with -backend=services. Broker is a RabbitMQ, or
// a NATS for a shop with -broker=nats.
func (s Servers) Env() []string {
	broker := "AMQP_URL="
	if strings.HasPrefix(s.Broker, "nats:") {
		broker = "NATS_URL="
	}
	return []string{"DATABASE_URL=" + s.Database, "REDIS_URL=" + s.Redis, broker + s.Broker}
}
