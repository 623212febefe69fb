package sqlstate_test

import (
	"errors"
	"fmt"
	"os"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/holdfast-go/holdfast/internal/sqlstate"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

type foreign struct{}

func (foreign) Error() string    { return "of another client" }
func (foreign) SQLState() string { return "40001" }

func TestOf(t *testing.T) {
	t.Parallel()
	for want, err := range map[string]error{
		"":      errors.New("no answer"),
		"23505": fmt.Errorf("wrapped: %w", &pgconn.PgError{Code: "23505"}),
		"40001": errors.Join(errors.New("other"), fmt.Errorf("wrapped: %w", foreign{})),
	} {
		if got := sqlstate.Of(err); got != want {
			t.Errorf("%v has %q, want %q", err, got, want)
		}
	}
	if got := sqlstate.Of(nil); got != "" {
		t.Errorf("nil has %q", got)
	}
}
