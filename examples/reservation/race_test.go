package main_test

import (
	"fmt"
	"math/rand/v2"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// TestBuyersAndSweepers lets buyers in two processes take over what two sweepers expire at the same time. No
// relay runs, so the outbox keeps what was announced.
func TestBuyersAndSweepers(t *testing.T) {
	t.Parallel()
	s := newServices(t)
	apis := startAPIs(t, s, "-user-limit=1000000", "-hold=1s")
	for range 2 {
		start(t, s.env(), "-backend=services", "-role=sweeper", "-sweep=@every 1s")
	}
	event := apis[0].newEvent(`{"name":"Rush","seats":200}`)

	ctx := t.Context()
	var enough atomic.Bool
	var crowd sync.WaitGroup
	for i := range 16 {
		crowd.Go(func() {
			c, user := apis[i%2], newUser()
			for !enough.Load() {
				if err := buyOrSettle(c, user, event); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	<-time.After(6 * time.Second)
	var expired, confirmed int
	for end := time.Now().Add(patience); (expired == 0 || confirmed == 0) && time.Now().Before(end); {
		for status, n := range map[string]*int{"expired": &expired, "confirmed": &confirmed} {
			if err := pgxScan(ctx, s, n, "select count(*) from reservations where status = $1", status); err != nil {
				t.Error(err)
			}
		}
	}
	enough.Store(true)
	crowd.Wait()

	for what, sql := range map[string]string{
		"seats that belong to no reservation that has them": `select count(*) from seats s left join reservations r on r.id = s.reservation_id
			where s.state <> 'free' and (r.id is null or r.status <> s.state or not s.number = any(r.seats))`,
		"reservations that lack a seat": `select count(*) from reservations r where status in ('held', 'confirmed')
			and (select count(*) from seats s where s.reservation_id = r.id) <> cardinality(r.seats)`,
		"reservations not announced once per change": `select count(*) from reservations r
			left join (select ordering_key, array_agg(name order by name) names from holdfast_outbox group by 1) o on o.ordering_key = r.id::text
			where o.names is distinct from case r.status when 'held' then array['reservation.held'] else
				(select array_agg(n order by n) from unnest(array['reservation.held', 'reservation.' || r.status]) n) end`,
	} {
		var n int
		if err := pgxScan(ctx, s, &n, sql); err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		if n != 0 {
			t.Errorf("%d %s", n, what)
		}
	}
	if expired == 0 || confirmed == 0 {
		t.Errorf("%d reservations expired and %d were confirmed: this tested nothing", expired, confirmed)
	}
}

// buyOrSettle holds some seats and, now and then, cancels or confirms them. Only honest refusals are fine; after a
// 503, which a crowd of processes at one event may meet, it asks again.
func buyOrSettle(c *client, user, event string) error {
	first := 1 + rand.IntN(9)
	wish := fmt.Sprintf(`"quantity":%d`, 1+rand.IntN(3))
	if rand.IntN(2) == 0 {
		wish = fmt.Sprintf(`"seats":["A%d","A%d"]`, first+1, first)
	}
	r, err := c.postUntilDone(user, "/api/reservations", holdBody(event, wish))
	if err != nil {
		return err
	}
	if r.status != http.StatusCreated {
		return refusal(r, "SEATS_UNAVAILABLE")
	}
	var held reservation
	r.t = c.t
	r.into(&held)
	then := "cancel"
	switch dice := rand.IntN(20); {
	case dice == 0:
		then = "confirm"
	case dice < 10:
		return nil // and let it expire
	}
	r, err = c.postUntilDone(user, "/api/reservations/"+held.ID+"/"+then, "")
	if err != nil || r.status == http.StatusOK {
		return err
	}
	return refusal(r, "RESERVATION_EXPIRED")
}

func refusal(r reply, want string) error {
	if r.status == http.StatusConflict && r.code() == want {
		return nil
	}
	return fmt.Errorf("answer is %d %s, want 409 %s", r.status, r.body, want)
}
