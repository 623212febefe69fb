package sqlident_test

import (
	"errors"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/holdfast-go/holdfast/internal/sqlident"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

func TestQualify(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ schema, table, want string }{
		{"", "holdfast_outbox", `"holdfast_outbox"`},
		{"app", "Outbox_2", `"app"."Outbox_2"`},
		{"", strings.Repeat("a", 63), `"` + strings.Repeat("a", 63) + `"`},
	} {
		got, err := sqlident.Qualify(tt.schema, tt.table)
		if err != nil || got != tt.want {
			t.Errorf("Qualify(%q, %q) = %q, %v; want %q", tt.schema, tt.table, got, err, tt.want)
		}
	}
	for _, tt := range []struct{ schema, table string }{
		{"", ""},
		{"", "2fast"},
		{"", `a"b`},
		{"", "a b"},
		{"", "a;drop table b"},
		{"", "größe"},
		{"", strings.Repeat("a", 64)},
		{"a.b", "c"},
		{`x"`, "c"},
	} {
		if got, err := sqlident.Qualify(tt.schema, tt.table); !errors.Is(err, sqlident.ErrInvalid) {
			t.Errorf("Qualify(%q, %q) = %q, %v; want ErrInvalid", tt.schema, tt.table, got, err)
		}
	}
}

func FuzzQuote(f *testing.F) {
	for _, seed := range []string{"holdfast_outbox", `a"; --`, "", "ä"} {
		f.Add(seed)
	}
	plain := regexp.MustCompile(`^"[A-Za-z_][A-Za-z0-9_]{0,62}"$`)
	f.Fuzz(func(t *testing.T, name string) {
		quoted, err := sqlident.Quote(name)
		if err == nil && !plain.MatchString(quoted) {
			t.Errorf("Quote(%q) = %s", name, quoted)
		}
	})
}
