package archtest_test

import (
	"path/filepath"
	"strings"
	"testing"
)

// Migration tools know one sequence of numbers: no two packages have one of them, and each file has
// another that undoes it.
func TestMigrationsHaveNumbersOfTheirOwn(t *testing.T) {
	t.Parallel()
	all, err := filepath.Glob("../../*/*/migrations/*.sql")
	if err != nil {
		t.Fatal(err)
	}
	names, packages := map[string]bool{}, map[string]string{}
	for _, path := range all {
		name, number := filepath.Base(path), filepath.Base(path)[:4]
		names[name] = true
		if strings.HasSuffix(name, ".down.sql") {
			continue
		}
		if other := packages[number]; other != "" {
			t.Errorf("%s: the number is that of %s", path, other)
		}
		packages[number] = path
	}
	for _, path := range packages {
		if down := strings.TrimSuffix(filepath.Base(path), ".sql") + ".down.sql"; !names[down] {
			t.Errorf("%s: there is no %s", path, down)
		}
	}
	if len(packages) < 5 {
		t.Errorf("%d migrations were found", len(packages))
	}
}
