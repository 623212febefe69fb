package archtest_test

import (
	"strings"
	"testing"
	"unicode"
)

// lengths are the maximum words of documents, by the start of their paths.
var lengths = map[string]int{
	"README.md":                                  550,
	"CHANGELOG.md":                               500,
	"CONTRIBUTING.md":                            450,
	"SECURITY.md":                                350,
	"txretry/README.md":                          700,
	"idempotency/README.md":                      700,
	"outbox/README.md":                           700,
	"inbox/README.md":                            700,
	"ratelimit/README.md":                        700,
	"expiry/README.md":                           700,
	"modules/operator/README.md":                 750,
	"ARCHITECTURE.md":                            1600,
	"modules/kafka/README.md":                    350,
	"modules/nats/README.md":                     300,
	"modules/rpc/README.md":                      500,
	"modules/watermill/README.md":                300,
	"examples/":                                  6250,
	"modules/operator/observability/runbooks.md": 1100,
}

// maxWords is the maximum number of words of all documents outside internal/lab together.
const maxWords = 16_000

// TestDocuments_length keeps documents short. A word has a letter or a digit; words in code count, too.
func TestDocuments_length(t *testing.T) {
	t.Parallel()
	words := map[string]int{}
	for _, file := range files(t, ".md") {
		for start := range lengths {
			if strings.HasPrefix(strings.TrimPrefix(file, "../../"), start) {
				words[start] += countWords(read(t, file))
			}
		}
	}
	total := 0
	for _, file := range files(t, ".md") {
		if !strings.HasPrefix(file, "../../internal/lab/") {
			total += countWords(read(t, file))
		}
	}
	if total > maxWords {
		t.Errorf("all documents have %d words, at most %d are allowed", total, maxWords)
	}
	for start, most := range lengths {
		if n := words[start]; n == 0 || n > most {
			t.Errorf("%s has %d words, want 1 to %d", start, n, most)
		}
	}
}

// maxDoc is the maximum number of lines of a package comment. Comments about algorithms stand at the head of their file.
const maxDoc = 80

// TestPackageComments_length counts the lines of each doc.go, except in the engine, whose doc.go draws the states of a
// message.
func TestPackageComments_length(t *testing.T) {
	t.Parallel()
	for _, file := range files(t, "/doc.go") {
		if strings.HasSuffix(file, "inbox/engine/doc.go") {
			continue
		}
		if lines := strings.Count(read(t, file), "\n"); lines > maxDoc {
			t.Errorf("%s has %d lines, at most %d are allowed", file, lines, maxDoc)
		}
	}
}

func countWords(text string) (n int) {
	for word := range strings.FieldsSeq(text) {
		if strings.ContainsFunc(word, func(r rune) bool { return unicode.IsLetter(r) || unicode.IsDigit(r) }) {
			n++
		}
	}
	return n
}
