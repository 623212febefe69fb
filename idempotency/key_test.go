package idempotency_test

import (
	"bytes"
	"errors"
	"log/slog"
	"regexp"
	"strings"
	"testing"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/driver"
)

const goodKey = "a0eebc999c0b4ef8bb6d6bb9bd380a11"

// malformed are header values that are no key.
var malformed = map[string]string{
	"empty":               "",
	"space":               " ",
	"short":               goodKey[:31],
	"long":                goodKey + "1",
	"upper case":          strings.ToUpper(goodKey),
	"one upper case":      "A" + goodKey[1:],
	"hyphens":             "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11",
	"braces":              "{" + goodKey + "}",
	"version 1":           "a0eebc999c0b1ef8bb6d6bb9bd380a11",
	"version 7":           "a0eebc999c0b7ef8bb6d6bb9bd380a11",
	"variant 7":           "a0eebc999c0b4ef87b6d6bb9bd380a11",
	"variant c":           "a0eebc999c0b4ef8cb6d6bb9bd380a11",
	"nil UUID":            strings.Repeat("0", 32),
	"not hex":             "g0eebc999c0b4ef8bb6d6bb9bd380a11",
	"half quoted":         `"` + goodKey,
	"half quoted, end":    goodKey + `"`,
	"twice quoted":        `""` + goodKey + `""`,
	"single quotes":       "'" + goodKey + "'",
	"quoted with space":   `" ` + goodKey + `"`,
	"quoted, parameter":   `"` + goodKey + `";a=1`,
	"quotes alone":        `""`,
	"quotes inside":       `"` + goodKey[:30] + `"a`,
	"list":                goodKey + ", " + goodKey,
	"leading space":       " " + goodKey,
	"trailing newline":    goodKey + "\n",
	"control byte":        "\x00" + goodKey[1:],
	"wide digits":         "０" + goodKey[3:],
	"scoped":              "@a:" + goodKey,
	"a megabyte":          strings.Repeat("a", 1<<20),
	"invalid UTF-8":       "\xff" + goodKey[1:],
	"fits but not hex v4": "zzzzzzzzzzzz4zzz8zzzzzzzzzzzzzzz",
}

func TestParseKey(t *testing.T) {
	t.Parallel()
	for _, header := range []string{goodKey, `"` + goodKey + `"`} {
		if key, err := idempotency.ParseKey(header); err != nil || key != goodKey {
			t.Errorf("ParseKey(%q) = %q, %v", header, key, err)
		}
	}
	for name, header := range malformed {
		if key, err := idempotency.ParseKey(header); !errors.Is(err, idempotency.ErrKeyInvalid) || key != "" {
			t.Errorf("%s: ParseKey = %q, %v; want ErrKeyInvalid", name, key, err)
		}
	}
	if key, err := idempotency.ParseKey(string(idempotency.NewKey())); err != nil {
		t.Errorf("NewKey made %q: %v", key, err)
	}
}

func FuzzParseKey(f *testing.F) {
	f.Add(goodKey)
	for _, header := range malformed {
		if len(header) < 100 {
			f.Add(header)
		}
	}
	wellFormed := regexp.MustCompile(`^[0-9a-f]{12}4[0-9a-f]{3}[89ab][0-9a-f]{15}$`)
	f.Fuzz(func(t *testing.T, header string) {
		key, err := idempotency.ParseKey(header)
		bare := header
		if len(header) > 1 && strings.HasPrefix(header, `"`) && strings.HasSuffix(header, `"`) {
			bare = header[1 : len(header)-1]
		}
		if want := wellFormed.MatchString(bare) && !strings.HasSuffix(bare, "\n"); (err == nil) != want {
			t.Errorf("ParseKey(%q) = %q, %v", header, key, err)
		}
		if err == nil && (string(key) != bare || key.Validate() != nil) {
			t.Errorf("ParseKey(%q) = %q", header, key)
		}
	})
}

func FuzzScopesAreApart(f *testing.F) {
	f.Add("a", "b")
	f.Add("a:", "a%3A")
	f.Add("lock", "")
	f.Add(strings.Repeat("x", 200), "~x")
	f.Fuzz(func(t *testing.T, a, b string) {
		key := idempotency.Key(goodKey)
		inA, inB := key.In(a), key.In(b)
		if (a == b) != (inA == inB) || inA == key {
			t.Errorf("scopes %q and %q: %q and %q", a, b, inA, inB)
		}
		if err := inA.Validate(); err != nil || strings.ContainsAny(string(inA), "{}\n ") || len(inA) > 200 {
			t.Errorf("scope %q: %q, %v", a, inA, err)
		}
		if inA.In(b) != inB {
			t.Errorf("moved from %q to %q: %q", a, b, inA.In(b))
		}
	})
}

func TestKeyIsNotLogged(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	claim := driver.NewClaim(goodKey, driver.FingerprintOf())
	slog.New(slog.NewTextHandler(&out, nil)).Info("x",
		slog.Any("key", claim.Key), slog.Any("claim", claim), slog.Any("pointer", &claim))
	if strings.Contains(out.String(), goodKey) || strings.Contains(out.String(), claim.Token) || strings.Count(out.String(), "=sha256:") != 3 {
		t.Errorf("log line %q", out.String())
	}
}

func TestFingerprint(t *testing.T) {
	t.Parallel()
	a, b := driver.FingerprintOf("ab", "c"), driver.FingerprintOf("a", "bc")
	if !a.Conflicts(b) || a.Conflicts(driver.FingerprintOf("ab", "c")) {
		t.Errorf("%v and %v", a, b)
	}
	if a.Conflicts(driver.Fingerprint{}) || (driver.Fingerprint{}).Conflicts(a) {
		t.Error("a record without a fingerprint conflicts")
	}
	const who, other = "0123456789abcdef0123456789abcdef", "f123456789abcdef0123456789abcdef"
	for _, tt := range []struct {
		sum     string
		version int
		want    bool
	}{
		{who + who, 1, false},
		{who + other, 1, true},
		{who + other, 2, false}, // bodies of different versions say nothing about each other
		{other + who, 1, true},
		{other + who, 2, true},
		{"short", 2, true},
	} {
		f := driver.Fingerprint{Version: 1, Sum: who + who}
		if g := (driver.Fingerprint{Version: tt.version, Sum: tt.sum}); f.Conflicts(g) != tt.want || g.Conflicts(f) != tt.want {
			t.Errorf("%v and %v: conflict is %v", f, g, !tt.want)
		}
	}
}
