package main

import (
	"context"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/inbox/inboxtest"
	"github.com/holdfast-go/holdfast/modules/service"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

func post(handler http.Handler, key idempotency.Key) *httptest.ResponseRecorder {
	r := httptest.NewRequest(http.MethodPost, "/orders", strings.NewReader(`{"cents": 4200}`))
	r.Header.Set(idempotency.Header, string(key))
	r.Header.Set("X-User-Id", "me")
	w := httptest.NewRecorder()
	handler.ServeHTTP(w, r)
	return w
}

// Every message is delivered twice. The first order has a conflict, then a commit whose
// reply is lost.
func TestBill_onceDespiteFaults(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newApp(&service.Group{}, inboxtest.Queue{Fault: inboxtest.DeliverTwice},
			txretrytest.Fault{Point: txretrytest.AtCommit, SQLSTATE: "40001"},
			txretrytest.Fault{Point: txretrytest.ReplyLostApplied})
		ctx, stop := context.WithCancel(t.Context())
		var running sync.WaitGroup
		running.Go(func() { check(a.relay.Run(ctx)) })
		running.Go(func() { check(a.consumer.Run(ctx)) })
		key := idempotency.NewKey()
		first, again := post(a.handler, key), post(a.handler, key)
		if first.Code != http.StatusCreated || again.Body.String() != first.Body.String() {
			t.Errorf("first %d %s, then %d %s", first.Code, first.Body, again.Code, again.Body)
		}
		time.Sleep(time.Minute) // of the bubble's clock
		if orders, invoices := a.data.counts(); orders != 1 || invoices != 1 {
			t.Errorf("%d orders, %d invoices", orders, invoices)
		}
		stop()
		running.Wait()
	})
}

func TestPlace_badOrderChangesNothing(t *testing.T) {
	a := newApp(&service.Group{}, inboxtest.Queue{})
	r := httptest.NewRequest(http.MethodPost, "/orders", strings.NewReader("4200"))
	r.Header.Set(idempotency.Header, string(idempotency.NewKey()))
	r.Header.Set("X-User-Id", "me")
	w := httptest.NewRecorder()
	a.handler.ServeHTTP(w, r)
	if orders, _ := a.data.counts(); w.Code != http.StatusBadRequest || orders != 0 {
		t.Errorf("%d %s, %d orders", w.Code, w.Body, orders)
	}
}
