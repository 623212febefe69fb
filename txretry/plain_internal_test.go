package txretry

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5"
)

type rewriter struct{}

func (rewriter) RewriteQuery(_ context.Context, _ *pgx.Conn, _ string, args []any) (string, []any, error) {
	return "rollback to a", args, nil
}

func TestIsPlain_onlyRowStatements(t *testing.T) {
	t.Parallel()
	for sql, want := range map[string]bool{
		"select 1":                            true,
		"  SELECT 1 ;\n":                      true,
		"select*from a":                       true,
		"values(1)":                           true,
		"-- name: Add :exec\r\nInsert into a": true,
		"/* a /* b */ c */--\n\t/**/ with a as ()": true,
		"":                                     false,
		"select":                               false,
		"selection":                            false,
		"select_1":                             false,
		"savepoint a":                          false,
		"select 1; savepoint a":                false,
		"/* a /* */ select 1 */ savepoint a":   false,
		"/* select 1":                          false,
		"-- select 1":                          false,
		"--\rsavepoint a\nselect 1":            false,
		"select SET_Config('role', 'a', true)": false,
		"update pg_settings set setting = 'a'": false,
		"do $$ begin end $$":                   false,
		"set local role a":                     false,
		"execute a":                            false,
		"explain analyze select 1":             false,
		"\ufeffselect 1":                       false,
	} {
		if got := isPlain(sql, nil); got != want {
			t.Errorf("isPlain(%q) = %v", sql, got)
		}
	}
	for name, args := range map[string][]any{
		"named": {pgx.NamedArgs{}}, "strict": {pgx.QueryExecModeExec, pgx.StrictNamedArgs{}}, "plain": {1, nil},
	} {
		if !isPlain("select 1", args) {
			t.Errorf("%s arguments are not plain", name)
		}
	}
	if isPlain("select 1", []any{pgx.QueryExecModeExec, rewriter{}}) {
		t.Error("a rewriter is plain")
	}
}
