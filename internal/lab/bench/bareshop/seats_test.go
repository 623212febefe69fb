package main

import (
	"fmt"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/internal/lab/load"
	"github.com/holdfast-go/holdfast/internal/lab/shop"
	"github.com/holdfast-go/holdfast/internal/pgtest"
)

// What is compared with the shop must at least sell each seat once, and answer as the shop does.
func TestASeatIsSoldOnce(t *testing.T) {
	t.Parallel()
	for _, atOnce := range []bool{false, true} {
		t.Run(fmt.Sprintf("at once: %v", atOnce), func(t *testing.T) {
			t.Parallel()
			pool := pgtest.New(t)
			if _, err := pool.Exec(t.Context(), schema); err != nil {
				t.Fatal(err)
			}
			server := httptest.NewServer(seats{pool, atOnce}.handler())
			defer server.Close()
			const clients = 8
			hall, err := shop.OpenHall(t.Context(), server.URL, clients, shop.EnoughSeats(time.Second))
			if err != nil {
				t.Fatal(err)
			}
			defer hall.Close()
			l, err := load.Drive(t.Context(), clients, 200*time.Millisecond, hall.Hold)
			if err != nil {
				t.Fatal(err)
			}
			told := hall.TakeAnswers()
			var reservations, sold int
			if err := pool.QueryRow(t.Context(), "select (select count(*) from reservations), (select count(*) from seats where state = 'held')").Scan(&reservations, &sold); err != nil {
				t.Fatal(err)
			}
			if l.GaveUp > 0 || told[shop.AnswerHeld] == 0 || told[shop.AnswerHeld] != reservations || sold != reservations {
				t.Errorf("%v: %d reservations of %d seats, want one of each for each 201", told, reservations, sold)
			}
		})
	}
}
