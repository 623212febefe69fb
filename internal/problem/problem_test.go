package problem_test

import (
	"encoding/json"
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

func TestWriteSurvivesWhatJSONCannotHold(t *testing.T) {
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
