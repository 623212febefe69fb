package problem_test

import (
	"errors"
	"fmt"
	"net/http"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/internal/problem"
)

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
