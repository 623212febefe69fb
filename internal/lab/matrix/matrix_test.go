package main

import (
	"os"
	"regexp"
	"slices"
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
	text := render("head", []outcome{
		{"PostgreSQL", "15.1 with PgBouncer 1.18.0", "bookworm", []suite{{"a/pgx", 7, 0, nil}, {"b", 8, 1, nil}}},
		{"PostgreSQL", "17.2 with PgBouncer 1.24.1", "trixie", []suite{{"a/pgx", 0, 0, []string{"TestX"}}, {"b", 8, 0, nil}}},
		{"Valkey", "8.1.1", "trixie", []suite{{"c", 9, 0, nil}}},
	})
	for _, want := range []string{
		"\n\nhead\n\n", "\n| version | release | pgx | b |\n|---|---|---|---|\n",
		"\n| 15.1 with PgBouncer 1.18.0 | bookworm | 7 passed | 8 passed, 1 skipped |\n",
		"\n| 17.2 with PgBouncer 1.24.1 | trixie | failed: TestX | 8 passed |\n",
		"\n## Valkey\n\n| version | release | c |\n|---|---|---|\n| 8.1.1 | trixie | 9 passed |\n",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in\n%s", want, text)
		}
	}
}

func TestTested(t *testing.T) {
	t.Parallel()
	text := render("head", []outcome{
		{"PostgreSQL", "15.18 with PgBouncer 1.18.0", "bookworm", []suite{{"b", 8, 0, nil}}},
		{"PostgreSQL", "17.12 with PgBouncer 1.24.1", "trixie", []suite{{"b", 8, 0, nil}}},
		{"PostgreSQL", "18.6 with PgBouncer 1.26.1", "forky", []suite{{"b", 8, 0, nil}}},
		{"Redis", "8.0.2", "trixie", []suite{{"b", 8, 0, nil}}},
		{"Redis", "8.0.6", "forky", []suite{{"b", 8, 0, nil}}},
		{"RabbitMQ", "3.10.8", "bookworm", []suite{{"b", 8, 0, nil}}},
		{"RabbitMQ", "4.0.5", "trixie", []suite{{"b", 8, 0, nil}}},
	})
	want := []string{"PostgreSQL 15, 17 and 18", "Redis 8.0", "RabbitMQ 3.10 and 4.0"}
	if got := tested(text); !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}

// What the README, CI and compose.yaml name is what the committed report is about, and no suite failed.
func TestNamedVersionsAreTested(t *testing.T) {
	t.Parallel()
	report := content(t, "report.md")
	if strings.Contains(report, "failed") {
		t.Error("the committed report has suites that failed")
	}
	_, section, _ := strings.Cut(content(t, "../../../README.md"), "\n## Versions\n")
	var named []string
	for _, names := range regexp.MustCompile(`(PostgreSQL|Redis|Valkey|RabbitMQ) [0-9.]+((, | and )[0-9.]+)*`).FindAllString(section, -1) {
		named = append(named, strings.TrimRight(names, "."))
	}
	if want := tested(report); !slices.Equal(named, want) {
		t.Errorf("the README names %q, and %q were tested", named, want)
	}
	jobs := regexp.MustCompile(`golang:[0-9.]+-(\w+) # (.+)`).FindAllStringSubmatch(content(t, "../../../.github/workflows/ci.yml"), -1)
	images := regexp.MustCompile(`image: (\w+):([0-9.]+)`).FindAllStringSubmatch(content(t, "../../../compose.yaml"), -1)
	if len(jobs) == 0 || len(images) == 0 {
		t.Fatalf("CI has the images %q, compose.yaml has %q", jobs, images)
	}
	for _, job := range jobs {
		for server := range strings.SplitSeq(job[2], ", ") {
			product, version, _ := strings.Cut(server, " ")
			if !ran(report, product, version, job[1]) {
				t.Errorf("CI names %s of %s, which the report has not", server, job[1])
			}
		}
	}
	for _, image := range images {
		product := map[string]string{"postgres": "PostgreSQL", "redis": "Redis", "rabbitmq": "RabbitMQ"}[image[1]]
		if !ran(report, product, image[2], `\w+`) {
			t.Errorf("compose.yaml has %s %s, which the report has not", image[1], image[2])
		}
	}
}

// ran reports whether the suites ran on that version of a product, of a release that the expression matches.
func ran(report, product, version, release string) bool {
	_, rows, _ := strings.Cut(report, "\n## "+product+"\n")
	rows, _, _ = strings.Cut(rows, "\n## ")
	return regexp.MustCompile(`\n\| ` + regexp.QuoteMeta(version) + `\.[^|]*\| ` + release + ` \|`).MatchString(rows)
}

func content(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}
