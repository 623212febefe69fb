package main

import (
	"strings"
	"testing"
)

func TestRead(t *testing.T) {
	t.Parallel()
	events := `{"Action":"output","Test":"TestA/part","Output":"broken\n"}
{"Action":"fail","Test":"TestA/part"}
{"Action":"fail","Test":"TestA"}
{"Action":"output","Test":"TestB","Output":"fine\n"}
{"Action":"pass","Test":"TestB/part"}
{"Action":"pass","Test":"TestB"}
{"Action":"skip","Test":"TestC"}
{"Action":"fail"}
`
	var log strings.Builder
	s, err := read("pack", strings.NewReader(events), &log)
	if err != nil || s.String() != "failed: TestA" || s.Passed != 1 || s.Skipped != 1 {
		t.Errorf("%+v, %v", s, err)
	}
	if log.String() != "broken\n" {
		t.Errorf("said %q of the failed test", log.String())
	}
	s, err = read("pack", strings.NewReader(`{"Action":"fail"}`), &log)
	if err != nil || s.String() != "failed: the package" {
		t.Errorf("a package that does not build: %+v, %v", s, err)
	}
}

func TestRender(t *testing.T) {
	t.Parallel()
	text := render([]outcome{
		{"PostgreSQL", "15.1 with PgBouncer 1.18.0", "bookworm", []suite{{"a/pgx", 7, 0, nil}, {"b", 8, 1, nil}}},
		{"PostgreSQL", "17.2 with PgBouncer 1.24.1", "trixie", []suite{{"a/pgx", 0, 0, []string{"TestX"}}, {"b", 8, 0, nil}}},
		{"Valkey", "8.1.1", "trixie", []suite{{"c", 9, 0, nil}}},
	})
	for _, want := range []string{
		"\n| version | release | pgx | b |\n|---|---|---|---|\n",
		"\n| 15.1 with PgBouncer 1.18.0 | bookworm | 7 passed | 8 passed, 1 skipped |\n",
		"\n| 17.2 with PgBouncer 1.24.1 | trixie | failed: TestX | 8 passed |\n",
		"\n## Valkey\n\n| version | release | c |\n|---|---|---|\n| 8.1.1 | trixie | 9 passed |\n",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in\n%s", want, text)
		}
	}
}
