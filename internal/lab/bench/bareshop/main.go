// Command bareshop holds seats like examples/reservation, but its only guarantee is the lock on the seat. With -guarded
// it also has idempotency keys, a limit for each user and rows of an outbox, written by hand. It has no relay, retries,
// expiry or read model. Its requests, answers and tables equal the shop's; a lost race is a 409 of the same form. It
// prints "listening on" and its address, and ends on SIGTERM. The benchmark compares the shop with it.
package main

import (
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/signal"
	"strconv"
	"syscall"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

// conns equals the shop's number of connections for requests.
const conns = 16

// schema has the tables that a hold reads and writes, with their indexes.
//
//go:embed schema.sql
var schema string

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	err := run(ctx)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "bareshop:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context) error {
	addr := flag.String("addr", "127.0.0.1:0", "`address` to listen on")
	guarded := flag.Bool("guarded", false, "keep keys, limits and an outbox")
	flag.Parse()
	cfg, err := pgxpool.ParseConfig(os.Getenv("DATABASE_URL"))
	if err != nil {
		return err
	}
	cfg.MaxConns = conns
	pool, err := pgxpool.NewWithConfig(ctx, cfg)
	if err != nil {
		return err
	}
	defer pool.Close()
	if _, err := pool.Exec(ctx, schema); err != nil {
		return err
	}
	l, err := net.Listen("tcp", *addr)
	if err != nil {
		return err
	}
	return serve(ctx, l, seats{pool, *guarded}.handler())
}

func serve(ctx context.Context, l net.Listener, h http.Handler) error {
	server := &http.Server{Handler: h, ReadHeaderTimeout: 10 * time.Second}
	closed := make(chan error, 1)
	context.AfterFunc(ctx, func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		closed <- server.Shutdown(ctx)
	})
	fmt.Printf("bareshop: listening on http://%s \n", l.Addr())
	if err := server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return <-closed
}

const (
	// hold is how long a seat is held, as in the shop.
	hold = 15 * time.Minute
	// maxBody bounds a request, in bytes.
	maxBody = 64 << 10
)

// errTaken is the answer to a hold that came too late.
var errTaken = errors.New("the seat is taken")

// seats are the seats in a database.
type seats struct {
	pool *pgxpool.Pool
	keys bool // holds have keys, limits and events
}

type event struct {
	ID    string `json:"id"`
	Name  string `json:"name"`
	Seats int    `json:"seats"`
	Map   []seat `json:"map,omitempty"`
}

type seat struct {
	Seat  string `json:"seat"`
	State string `json:"state"`
}

type reservation struct {
	ID        string    `json:"id"`
	EventID   string    `json:"event_id"`
	Seats     []string  `json:"seats"`
	Status    string    `json:"status"`
	ExpiresAt time.Time `json:"expires_at"`
}

func (s seats) handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /api/events", s.addEvent)
	mux.HandleFunc("GET /api/events/{id}", s.showEvent)
	mux.HandleFunc("POST /api/reservations", s.hold)
	return mux
}

func (s seats) addEvent(w http.ResponseWriter, r *http.Request) {
	var e event
	if !read(w, r, &e) {
		return
	}
	e.ID = uuid.NewString()
	var b pgx.Batch
	b.Queue("insert into events (id, name, seats) values ($1, $2, $3)", e.ID, e.Name, e.Seats)
	b.Queue("insert into seats (event_id, number) select $1::uuid, n from generate_series(1, $2::integer) n", e.ID, e.Seats)
	answer(w, http.StatusCreated, e, s.pool.SendBatch(r.Context(), &b).Close())
}

func (s seats) showEvent(w http.ResponseWriter, r *http.Request) {
	e := event{ID: r.PathValue("id")}
	rows, err := s.pool.Query(r.Context(), "select number::text, state from seats where event_id = $1 order by seats.number", e.ID)
	if err == nil {
		e.Map, err = pgx.CollectRows(rows, pgx.RowToStructByPos[seat])
	}
	answer(w, http.StatusOK, e, err)
}

func (s seats) hold(w http.ResponseWriter, r *http.Request) {
	var wish struct {
		EventID string `json:"event_id"`
		Seats   []string
	}
	if !read(w, r, &wish) {
		return
	}
	if len(wish.Seats) != 1 {
		http.Error(w, "name one seat", http.StatusBadRequest)
		return
	}
	number, err := strconv.Atoi(wish.Seats[0])
	if err != nil {
		http.Error(w, "no such seat", http.StatusBadRequest)
		return
	}
	made := reservation{uuid.NewString(), wish.EventID, wish.Seats, "held", time.Now().UTC().Add(hold)}
	if s.keys {
		s.guarded(w, r, made, number)
		return
	}
	answer(w, http.StatusCreated, made, s.take(r.Context(), made, number, r.Header.Get("X-Mock-User-Id")))
}

const lockSQL = `select state from seats where event_id = $1 and number = $2 for update`

const takeSQL = `update seats set state = 'held', reservation_id = $3, held_until = $4 where event_id = $1 and number = $2`

const addSQL = `
insert into reservations (id, event_id, user_id, seats, status, expires_at)
values ($1, $2, $3, $4, $5, $6)`

// take locks the seat, and writes the same rows as the shop.
func (s seats) take(ctx context.Context, made reservation, number int, user string) error {
	return pgx.BeginFunc(ctx, s.pool, func(tx pgx.Tx) error {
		var state string
		if err := tx.QueryRow(ctx, lockSQL, made.EventID, number).Scan(&state); err != nil {
			return err
		}
		if state != "free" {
			return errTaken
		}
		if _, err := tx.Exec(ctx, takeSQL, made.EventID, number, made.ID, made.ExpiresAt); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, addSQL, made.ID, made.EventID, user, []int{number}, made.Status, made.ExpiresAt)
		return err
	})
}

// read decodes a request. If that fails, it sends the error.
func read(w http.ResponseWriter, r *http.Request, into any) bool {
	err := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxBody)).Decode(into)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
	}
	return err == nil
}

// answer sends made, or the problem.
func answer(w http.ResponseWriter, status int, made any, err error) {
	switch {
	case errors.Is(err, errTaken):
		status, made = http.StatusConflict, taken()
	case err != nil:
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", contentType(status))
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(made) // the client may be gone: ignore the error
}

// taken is the body of the answer to a hold that came too late.
func taken() map[string]string {
	return map[string]string{"code": "SEATS_UNAVAILABLE", "detail": errTaken.Error()}
}

func contentType(status int) string {
	if status == http.StatusConflict {
		return "application/problem+json"
	}
	return "application/json"
}

// rows stores the number of changed rows.
func rows(n *int64) func(pgconn.CommandTag) error {
	return func(tag pgconn.CommandTag) error {
		*n = tag.RowsAffected()
		return nil
	}
}
