package idempotencytest

import (
	"context"
	"fmt"
	"net/http"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/internal/prove"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

// Prove runs what has an idempotency key on a real database under faults, as txretrytest.Proof
// describes, and compares the answers of each schedule. start makes a process as your program does: on
// the pool that it is given, it makes the idempotencypgx.Store, and returns one request with the key,
// such as a call of DoKey, or of your http.Handler with a httptest.ResponseRecorder. Each attempt is one
// request of a client, who asks again after an error, a status of 500 or more, and an answer that has a
// Retry-After. The key is one for all schedules, or, with Proof.Effects, one for each, so that another side that
// deduplicates by it is asked anew; it reads <key> in Proof.Rows. A gate should have a short lease: who comes after a killed process waits for its end.
func Prove(t txretrytest.TB, p txretrytest.Proof,
	start func(pool *pgxpool.Pool) (request func(ctx context.Context, key idempotency.Key) (idempotency.Response, error), err error),
) {
	t.Helper()
	var key idempotency.Key
	prove.Run(t, prove.Proof(p), prove.Work{
		Name: "idempotencytest.Prove", Keyed: true,
		Fresh: func() uuid.UUID {
			key = idempotency.NewKey()
			return uuid.MustParse(string(key))
		},
		Start: func(_ context.Context, pool *pgxpool.Pool) (func(ctx context.Context) prove.Outcome, error) {
			request, err := start(pool)
			key := key
			return func(ctx context.Context) prove.Outcome { return answered(request(ctx, key)) }, err
		},
	})
}

// answered is what a client makes of an answer.
func answered(resp idempotency.Response, err error) prove.Outcome {
	text := fmt.Sprintf("%d %s", resp.Status, resp.Body)
	if err == nil && (resp.Status >= http.StatusInternalServerError || resp.Header.Get("Retry-After") != "") {
		err = fmt.Errorf("answer %s", text)
	}
	return prove.Outcome{Answer: text, Err: err}
}
