package databasesql

import (
	"context"
	"errors"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/idempotencypgx"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/txretry"
	"github.com/holdfast-go/holdfast/txretry/txretrysql"
)

func (f *fixture) idempotency(t *testing.T, cfg idempotencypgx.Config) *idempotencypgx.Store {
	t.Helper()
	store, err := idempotencypgx.New(f.manager(t, txretry.Config{}), cfg)
	must(t, err)
	must(t, store.Migrate(t.Context()))
	return store
}

// place adds one and answers.
func place(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
	if err := add(ctx, txretrysql.Tx(tx)); err != nil {
		return idempotency.Response{}, err
	}
	return idempotency.JSON(http.StatusCreated, "placed")
}

// The effect in the *sql.Tx and the record are there together: once for each key, with the same answer.
func TestIdempotencyRecord(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, f *fixture) {
		f.exec(t, tables)
		store := f.idempotency(t, idempotencypgx.Config{})
		key := idempotency.NewKey()
		boom := errors.New("boom")
		_, _, err := store.DoKey(t.Context(), key, nil, func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
			resp, err := place(ctx, tx)
			return resp, errors.Join(err, boom)
		})
		if !errors.Is(err, boom) || f.count(t, "select n from counter") != 0 {
			t.Errorf("error %v, and an effect", err)
		}
		var all sync.WaitGroup
		var placed, inUse, replays atomic.Int64
		for range 8 {
			all.Go(func() {
				resp, replayed, err := store.DoKey(t.Context(), key, nil, place)
				switch {
				case errors.Is(err, idempotency.ErrKeyInUse):
					inUse.Add(1)
				case err != nil || resp.Status != http.StatusCreated || string(resp.Body) != "\"placed\"\n" && string(resp.Body) != `"placed"`:
					t.Errorf("%d %s, error %v", resp.Status, resp.Body, err)
				case replayed:
					replays.Add(1)
				default:
					placed.Add(1)
				}
			})
		}
		all.Wait()
		if n := f.count(t, "select n from counter"); n != 1 || placed.Load() != 1 || inUse.Load()+replays.Load() != 7 {
			t.Errorf("%d effects, %d placed, %d in use, %d replays", n, placed.Load(), inUse.Load(), replays.Load())
		}
		fresh := f.idempotency(t, idempotencypgx.Config{}) // which expects no replay, so its transaction finds the record
		resp, replayed, err := fresh.DoKey(t.Context(), key, nil, place)
		if !replayed || err != nil || resp.Status != http.StatusCreated || resp.Header.Get("Content-Type") == "" || !strings.Contains(string(resp.Body), "placed") {
			t.Errorf("%d %v %s, replayed %v, error %v", resp.Status, resp.Header, resp.Body, replayed, err)
		}
	})
}

// A COMMIT whose answer is lost is resolved by the record.
func TestIdempotencyCommitReplyLost(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, f *fixture) {
		f.exec(t, tables)
		proxy := testenv.NewProxy(t, f.pool.Config().ConnString())
		store := f.through(t, proxy.URL()).idempotency(t, idempotencypgx.Config{})
		commit := map[string]string{"pgx stdlib": "commit", "lib pq": "COMMIT"}[f.driver]
		proxy.SilenceOn(testenv.Silence{On: commit, Deliver: true, OneWay: true})
		healed := make(chan struct{})
		go func() {
			defer close(healed)
			testenv.Eventually(t, func() error {
				if f.count(t, "select n from counter") != 1 {
					return errors.New("not committed")
				}
				return nil
			})
			proxy.Heal() // resets the connection that has lost an answer
		}()
		resp, replayed, err := store.DoKey(t.Context(), idempotency.NewKey(), nil, place)
		<-healed
		if err != nil || replayed || resp.Status != http.StatusCreated {
			t.Errorf("%d, replayed %v, error %v", resp.Status, replayed, err)
		}
	})
}
