package migrate_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/holdfast-go/holdfast/internal/migrate"
)

func TestMissing(t *testing.T) {
	t.Parallel()
	ours := migrate.Missing{Call: "Migrate", Tables: []string{`"shop"."holdfast_outbox"`, `"shop"."holdfast_outbox_lanes"`}}
	for _, tc := range []struct {
		code, message string
		want          bool
	}{
		{"42P01", `relation "holdfast_outbox" does not exist`, true},
		{"42P01", `relation "shop.holdfast_outbox_lanes" does not exist`, true},
		{"42P01", `relation "shop.orders" does not exist`, false},
		{"3F000", `schema "shop" does not exist`, true},
		{"3F000", `schema "other" does not exist`, false},
		{"42703", `column "holdfast_outbox" does not exist`, false},
	} {
		err := ours.Explain(&pgconn.PgError{Code: tc.code, Message: tc.message})
		if got := strings.HasPrefix(err.Error(), "call Migrate first"); got != tc.want {
			t.Errorf("%s %s: %v", tc.code, tc.message, err)
		}
	}
	if err := ours.Explain(nil); err != nil {
		t.Error(err)
	}
	if other := errors.New("other"); ours.Explain(other) != other {
		t.Error("another error was changed")
	}
}
