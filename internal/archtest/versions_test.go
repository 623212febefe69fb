package archtest_test

import (
	"regexp"
	"strings"
	"testing"
)

// TestVersions: all images are of one version, and the README names it among those that are tested.
func TestVersions(t *testing.T) {
	t.Parallel()
	images := regexp.MustCompile(`\b(postgres|redis|rabbitmq):([0-9.]+)-`)
	versions := map[string]string{}
	for file, want := range map[string]int{
		"compose.yaml": 3, "examples/reservation/servers.go": 3, "internal/lab/servers/ladder.go": 3, "internal/testenv/postgres.go": 1,
	} {
		found := images.FindAllStringSubmatch(read(t, "../../"+file), -1)
		if len(found) != want {
			t.Errorf("%s names %d images, want %d", file, len(found), want)
		}
		for _, image := range found {
			product, version := image[1], image[2]
			if versions[product] == "" {
				versions[product] = version
			}
			if version != versions[product] {
				t.Errorf("%s names %s %s, another file %s", file, product, version, versions[product])
			}
		}
	}
	_, tested, _ := strings.Cut(read(t, "../../README.md"), "\nTested with ")
	tested, _, _ = strings.Cut(tested, "\n")
	for product, name := range map[string]string{"postgres": "PostgreSQL", "redis": "Redis", "rabbitmq": "RabbitMQ"} {
		if !regexp.MustCompile(name + `[0-9., and]* ` + regexp.QuoteMeta(versions[product]) + `\b`).MatchString(tested) {
			t.Errorf("the README does not say that %s %s is tested: %q", name, versions[product], tested)
		}
	}
}
