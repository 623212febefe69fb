package pgtest_test

import (
	"os"
	"testing"

	"github.com/holdfast-go/holdfast/internal/pgtest"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

func TestNewIsEmptyAndOwn(t *testing.T) {
	t.Parallel()
	var schemas []string
	t.Run("two at once", func(t *testing.T) {
		for range 2 {
			pool, schema := pgtest.NewSchema(t)
			schemas = append(schemas, schema)
			if _, err := pool.Exec(t.Context(), "CREATE TABLE same_name (id int)"); err != nil {
				t.Fatal(err)
			}
			again := pgtest.Pool(t, pool.Config().ConnString(), 1) // as another process would connect
			var current string
			if err := again.QueryRow(t.Context(), "SELECT current_schema FROM same_name RIGHT JOIN current_schema ON true").Scan(&current); err != nil {
				t.Fatal(err)
			}
			if current != schema {
				t.Errorf("schema %s, want %s", current, schema)
			}
		}
	})
	if len(schemas) != 2 {
		return // skipped
	}
	var left int
	err := pgtest.New(t).QueryRow(t.Context(), "SELECT count(*) FROM pg_namespace WHERE nspname = ANY($1)", schemas).Scan(&left)
	if err != nil || left != 0 {
		t.Errorf("%d schemas left, %v", left, err)
	}
}
