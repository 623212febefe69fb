package main

import (
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/holdfast-go/holdfast/internal/testenv"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

// The committed report covers the versions in the README, CI and compose.yaml, and no suite failed.
func TestNamedVersionsAreTested(t *testing.T) {
	t.Parallel()
	report := content(t, "report.md")
	if strings.Contains(report, "failed") {
		t.Error("the committed report has suites that failed")
	}
	_, section, _ := strings.Cut(content(t, "../../../README.md"), "\nTested with ")
	var named []string
	for _, names := range regexp.MustCompile(`(PostgreSQL|Redis|Valkey|RabbitMQ|NATS) [0-9.]+((, | and )[0-9.]+)*`).FindAllString(section, -1) {
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

// ran reports whether the suites ran on that version of a product, in a release that matches the expression.
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
