package problem_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/internal/problem"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

func TestWrite(t *testing.T) {
	t.Parallel()
	rec := httptest.NewRecorder()
	problem.Write(rec, problem.Problem{
		Status: 429, Code: "RATE_LIMITED", Detail: "wait", RetryAfter: 1200 * time.Millisecond,
		Extra: map[string]any{"limit": "user"},
	})
	if rec.Code != 429 || rec.Header().Get("Content-Type") != "application/problem+json" || rec.Header().Get("Retry-After") != "2" {
		t.Errorf("status %d, headers %v", rec.Code, rec.Header())
	}
	var got map[string]any
	if err := json.Unmarshal(rec.Body.Bytes(), &got); err != nil {
		t.Fatal(err)
	}
	for member, want := range map[string]any{
		"type": "about:blank", "status": 429.0, "title": "Too Many Requests", "code": "RATE_LIMITED", "detail": "wait", "limit": "user",
	} {
		if got[member] != want {
			t.Errorf("%s = %v, want %v", member, got[member], want)
		}
	}
}

func TestWriteType(t *testing.T) {
	t.Parallel()
	rec := httptest.NewRecorder()
	problem.Write(rec, problem.Problem{Status: 409, Code: "BUSY", Type: problem.Link("https://example.com/docs", "STILL_BUSY")})
	var got map[string]any
	if err := json.Unmarshal(rec.Body.Bytes(), &got); err != nil || got["type"] != "https://example.com/docs#still_busy" {
		t.Errorf("%s, %v", rec.Body, err)
	}
}

func TestWrite_extraThatCannotBeEncoded(t *testing.T) {
	t.Parallel()
	rec := httptest.NewRecorder()
	problem.Write(rec, problem.Problem{Status: 500, Code: "X", Extra: map[string]any{"f": func() {}}})
	if !json.Valid(rec.Body.Bytes()) || rec.Code != 500 {
		t.Errorf("status %d, body %s", rec.Code, rec.Body)
	}
}

func TestRetryAfterSeconds(t *testing.T) {
	t.Parallel()
	for d, want := range map[time.Duration]string{
		time.Millisecond: "1", time.Second: "1", time.Second + 1: "2", time.Minute: "60",
	} {
		if got := problem.RetryAfterSeconds(d); got != want {
			t.Errorf("RetryAfterSeconds(%v) = %s, want %s", d, got, want)
		}
	}
}

type soldOut struct{ status int }

func (soldOut) Error() string     { return "sold out" }
func (soldOut) Code() string      { return "SOLD_OUT" }
func (e soldOut) HTTPStatus() int { return e.status }

type coded = problem.Error

type embedding struct{ *coded }

func TestOf(t *testing.T) {
	t.Parallel()
	ours := &problem.Error{Text: "busy", Problem: problem.Problem{Status: 503, Code: "BUSY", Detail: "Wait.", RetryAfter: time.Second}}
	documented := ours.Problem
	documented.Type = "https://github.com/holdfast-go/holdfast/blob/main/examples/guides/problems.md#busy"
	for name, tt := range map[string]struct {
		err   error
		want  problem.Problem
		known bool
	}{
		"ours":         {fmt.Errorf("x: %w", ours), documented, true},
		"embedding":    {embedding{ours}, documented, true},
		"a user's":     {errors.Join(errors.New("x"), soldOut{http.StatusConflict}), problem.Problem{Status: 409, Code: "SOLD_OUT"}, true},
		"no status":    {soldOut{0}, problem.Problem{Status: 500, Code: "INTERNAL"}, false},
		"a success":    {soldOut{http.StatusNoContent}, problem.Problem{Status: 500, Code: "INTERNAL"}, false},
		"without code": {errors.New("x"), problem.Problem{Status: 500, Code: "INTERNAL"}, false},
	} {
		got, known := problem.Of(tt.err)
		if known != tt.known || got.Status != tt.want.Status || got.Code != tt.want.Code || got.Detail != tt.want.Detail || got.Type != tt.want.Type || got.RetryAfter != tt.want.RetryAfter {
			t.Errorf("%s: %+v, %v; want %+v", name, got, known, tt.want)
		}
	}
}
