package httpapi_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/examples/reservation/internal/booking"
	"github.com/holdfast-go/holdfast/examples/reservation/internal/httpapi"
	"github.com/holdfast-go/holdfast/examples/reservation/internal/memory"
)

// refusing is a database that is down.
type refusing struct{ *memory.Shop }

func (refusing) Events(context.Context, string, int) ([]booking.Event, error) {
	return nil, errors.New("connection refused")
}

// TestOutageCostsFewLines sends 6000 requests to a database that is down.
func TestOutageCostsFewLines(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newShop(t, 0)
		var log bytes.Buffer
		handler, err := httpapi.New(httpapi.Config{
			Backend: refusing{s.parts.Shop}, Keys: s.parts.Keys, Limiter: s.parts.Limiter, UserLimit: 10,
			Logger: slog.New(slog.NewTextHandler(&log, nil)),
		})
		if err != nil {
			t.Fatal(err)
		}
		s.handler = handler
		for range 6000 {
			s.do(get("/api/events")).wants(http.StatusServiceUnavailable, "UNAVAILABLE")
			time.Sleep(10 * time.Millisecond)
		}
		time.Sleep(time.Minute)
		synctest.Wait()
		text := log.String()
		if lines := strings.Count(text, "\n"); lines != 3 || strings.Count(text, "connection refused") != lines ||
			!strings.Contains(text, "repeats=2999") || !strings.Contains(text, "repeats=3000") {
			t.Errorf("an outage of a minute costs %d lines:\n%.2000s", lines, text)
		}
		s.do(get("/api/events"))
		if lines := strings.Count(log.String(), "\n"); lines != 4 {
			t.Errorf("the next outage is not logged at once:\n%s", log.String())
		}
		time.Sleep(time.Minute) // its timer ends
	})
}
