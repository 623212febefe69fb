package idempotency_test

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/idempotency/idempotencytest"
)

// malformed are header values that are not a key.
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
		{who + other, 2, false}, // bodies of different versions are not compared
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

// sameKeys are forms of the key goodKey, by the grammar that first accepts them.
var sameKeys = map[string]string{
	goodKey:                                goodKey,
	"quoted":                               `"` + goodKey + `"`,
	"UUID, hyphens":                        "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11",
	"UUID, quoted hyphens":                 `"a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"`,
	"UUID, upper case":                     "A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11",
	"UUID, mixed case":                     "a0eebc999c0b4ef8bb6d6bb9bd380A11",
	"UUID, braces":                         "{a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11}",
	"UUID, braces without hyphens, quoted": `"{` + goodKey + `}"`,
	"UUID, URN":                            "urn:uuid:a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11",
	"UUID, URN in capitals":                "URN:UUID:A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11",
}

func TestFormsOfOneKey(t *testing.T) {
	t.Parallel()
	for name, header := range sameKeys {
		strict, err := idempotency.ParseKey(header)
		if taken := !strings.HasPrefix(name, "UUID"); taken && strict != goodKey || !taken && !errors.Is(err, idempotency.ErrKeyInvalid) {
			t.Errorf("%s: ParseKey = %q, %v", name, strict, err)
		}
		uuid, err := idempotency.ParseUUID(header)
		if uuid != goodKey || err != nil {
			t.Errorf("%s: ParseUUID = %q, %v", name, uuid, err)
		}
		opaque, err := idempotency.ParseOpaque(header)
		if opaque != goodKey || err != nil {
			t.Errorf("%s: ParseOpaque = %q, %v", name, opaque, err)
		}
	}
}

func TestParseUUID(t *testing.T) {
	t.Parallel()
	for header, want := range map[string]idempotency.Key{
		"01890a5d-ac96-774b-bcce-b302099a8057": "01890a5dac96774bbcceb302099a8057", // version 7
		"c232ab00-9414-11ec-b3c8-9f6bdeced846": "c232ab00941411ecb3c89f6bdeced846", // version 1
	} {
		if key, err := idempotency.ParseUUID(header); key != want || err != nil || key.Validate() != nil {
			t.Errorf("ParseUUID(%q) = %q, %v", header, key, err)
		}
	}
	for name, header := range map[string]string{
		"empty": "", "quotes alone": `""`, "short": goodKey[:31], "long": goodKey + "0",
		"nil UUID": "00000000-0000-0000-0000-000000000000", "max UUID": "ffffffff-ffff-ffff-ffff-ffffffffffff",
		"variant c":          "a0eebc99-9c0b-4ef8-cb6d-6bb9bd380a11",
		"version 0":          "a0eebc99-9c0b-0ef8-bb6d-6bb9bd380a11",
		"version 9":          "a0eebc99-9c0b-9ef8-bb6d-6bb9bd380a11",
		"hyphens elsewhere":  "a0eebc999-c0b-4ef8-bb6d-6bb9bd380a11",
		"some hyphens":       "a0eebc99-9c0b4ef8bb6d6bb9bd380a11",
		"half a brace":       "{a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11",
		"other brackets":     "(a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11)",
		"URN in braces":      "{urn:uuid:a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11}",
		"URN alone":          "urn:uuid:",
		"half quoted":        `"a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11`,
		"quoted, parameter":  `"a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11";a=1`,
		"list":               goodKey + "," + goodKey,
		"trailing newline":   goodKey + "\n",
		"Kelvin signs":       strings.ReplaceAll(goodKey, "e", "\u212a"),
		"not hex":            "g0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11",
		"opaque":             "order-42",
		"scoped":             "@a:" + goodKey,
		"kept form of a sum": "~" + goodKey + goodKey,
	} {
		if key, err := idempotency.ParseUUID(header); !errors.Is(err, idempotency.ErrKeyInvalid) || key != "" {
			t.Errorf("%s: ParseUUID = %q, %v; want ErrKeyInvalid", name, key, err)
		}
	}
}

func TestParseOpaque(t *testing.T) {
	t.Parallel()
	taken := map[idempotency.Key]string{}
	for _, forms := range [][]string{ // of one key
		{"a", `"a"`},
		{"A"}, // case counts
		{"order-42", `"order-42"`},
		{`say"hi`, `"say\"hi"`},
		{`back\slash`, `"back\\slash"`},
		{`back\\slash`},
		{"@a:b"}, {"lock:a"}, {"{a}"}, {"%41"}, {"a,b"}, {":YWJj:"}, {"~"}, {"'a'"},
		{"~" + goodKey + goodKey},
		{strings.Repeat("x", 255), `"` + strings.Repeat("x", 255) + `"`},
		{`"` + strings.Repeat(`\"`, 255) + `"`},
	} {
		first, err := idempotency.ParseOpaque(forms[0])
		if err != nil || first.Validate() != nil || len(first) != 65 {
			t.Errorf("ParseOpaque(%q) = %q, %v", forms[0], first, err)
		}
		if other, known := taken[first]; known {
			t.Errorf("%q and %q are one key", forms[0], other)
		}
		taken[first] = forms[0]
		for _, form := range forms[1:] {
			if key, err := idempotency.ParseOpaque(form); key != first || err != nil {
				t.Errorf("ParseOpaque(%q) = %q, %v; want the key of %q", form, key, err, forms[0])
			}
		}
	}
	for name, header := range map[string]string{
		"empty": "", "quotes alone": `""`, "one quote": `"`, "two quotes and more": `"a"b"`,
		"256 characters": strings.Repeat("x", 256), "256 characters, quoted": `"` + strings.Repeat("x", 256) + `"`,
		"space": "a b", "quoted space": `"a b"`, "leading space": " a", "tab": "a\tb", "newline": "a\n",
		"control byte": "a\x00", "delete": "a\x7f", "not ASCII": "größe", "invalid UTF-8": "a\xff",
		"half quoted": `"a`, "half quoted, end": `a"`, "parameter": `"a";b=1`, "list": `"a", "b"`,
		"escape of something else": `"\a"`, "escape at the end": `"a\"`, "a megabyte": strings.Repeat("a", 1<<20),
	} {
		if key, err := idempotency.ParseOpaque(header); !errors.Is(err, idempotency.ErrKeyInvalid) || key != "" {
			t.Errorf("%s: ParseOpaque = %q, %v; want ErrKeyInvalid", name, key, err)
		}
	}
}

// A service may change to a wider grammar while keys are in use.
func FuzzGrammarsAgree(f *testing.F) {
	for _, header := range sameKeys {
		f.Add(header)
	}
	f.Add(`"say \"hi\""`)
	f.Add("~" + goodKey + goodKey)
	f.Fuzz(func(t *testing.T, header string) {
		strict, strictErr := idempotency.ParseKey(header)
		uuid, uuidErr := idempotency.ParseUUID(header)
		opaque, opaqueErr := idempotency.ParseOpaque(header)
		if strictErr == nil && (uuidErr != nil || uuid != strict) || uuidErr == nil && (opaqueErr != nil || opaque != uuid) {
			t.Errorf("%q: %q %v, %q %v, %q %v", header, strict, strictErr, uuid, uuidErr, opaque, opaqueErr)
		}
		if opaqueErr == nil && (opaque.Validate() != nil || opaque.In("a").In("b") != opaque.In("b") || opaque.In("a").Validate() != nil) {
			t.Errorf("%q: kept as %q", header, opaque)
		}
	})
}

func TestGrammarOfTheMiddleware(t *testing.T) {
	t.Parallel()
	version7 := func(header string) (idempotency.Key, error) {
		key, err := idempotency.ParseUUID(header)
		if err == nil && key[12] != '7' {
			err = errors.New("of another version")
		}
		return key, err
	}
	const ofVersion7 = "01890a5d-ac96-774b-bcce-b302099a8057"
	for name, tt := range map[string]struct {
		parse         func(string) (idempotency.Key, error)
		good, bad     string
		ask, inDetail string
	}{
		"default": {nil, goodKey, ofVersion7, "lowercase and without hyphens", "lowercase and without hyphens"},
		"UUID":    {idempotency.ParseUUID, ofVersion7, "order-42", "a UUID, such as a0eebc99-", "a UUID, such as a0eebc99-"},
		"opaque":  {idempotency.ParseOpaque, `"order-42"`, "order 42", "1 to 255 visible", "1 to 255 visible"},
		"own":     {version7, ofVersion7, goodKey, "a UUID", "requires"},
		"none":    {func(string) (idempotency.Key, error) { return "x", nil }, "", goodKey, "needs the header", "requires"},
	} {
		cfg := idempotency.MiddlewareConfig{ParseKey: tt.parse}
		runs := 0
		h := idempotency.RequireKey(cfg)(protect(t, idempotencytest.NewStore(), cfg, func(w http.ResponseWriter, _ *http.Request) { runs++ }))
		wantProblem := func(code, detail string, keys ...string) {
			r := post("", nil)
			r.Header["Idempotency-Key"] = keys
			rec := send(h, r)
			wantCode(t, name, rec, 400, code)
			if !strings.Contains(rec.Body.String(), detail) {
				t.Errorf("%s: %s; want %q in its detail", name, rec.Body, detail)
			}
		}
		wantProblem("IDEMPOTENCY_KEY_REQUIRED", tt.ask)
		wantProblem("IDEMPOTENCY_KEY_INVALID", tt.inDetail, tt.bad)
		if tt.good == "" {
			continue
		}
		wantProblem("IDEMPOTENCY_KEY_INVALID", "must be sent exactly once", tt.good, tt.good)
		for _, replayed := range []string{"", "true"} {
			if rec := send(h, post(tt.good, nil)); rec.Code != 200 || rec.Header().Get(idempotency.ReplayedHeader) != replayed {
				t.Errorf("%s: %d %v", name, rec.Code, rec.Header())
			}
		}
		if runs != 1 {
			t.Errorf("%s: %d runs", name, runs)
		}
	}
}

// guarded is a server whose handler answers with the length of the body. It counts the calls of its store.
type guarded struct {
	t     *testing.T
	conns pipes
	begun atomic.Int64
	ran   atomic.Int64
}

// guard serves connections in memory. A client that stops in the middle is dropped after 5 s.
func guard(t *testing.T) *guarded {
	t.Helper()
	g := &guarded{t: t, conns: make(pipes)}
	store := &faulty{Store: idempotencytest.NewStore(), begin: func() error { g.begun.Add(1); return nil }}
	h := protect(t, store, idempotency.MiddlewareConfig{MaxRequestBytes: 64 << 10, CanonicalJSON: true},
		func(w http.ResponseWriter, r *http.Request) {
			g.ran.Add(1)
			n, err := io.Copy(io.Discard, r.Body)
			if err != nil {
				t.Errorf("handler: %v", err)
			}
			fmt.Fprint(w, n)
		})
	server := &http.Server{Handler: h, ReadTimeout: 5 * time.Second}
	ended := make(chan struct{})
	go func() { defer close(ended); _ = server.Serve(g.conns) }()
	t.Cleanup(func() {
		close(g.conns)
		<-ended
		_ = server.Close()
		time.Sleep(time.Second) // of the bubble: a connection ends a little after its answer
	})
	return g
}

// pipes is a listener whose connections the test creates.
type pipes chan net.Conn

func (p pipes) Accept() (net.Conn, error) {
	if conn, ok := <-p; ok {
		return conn, nil
	}
	return nil, net.ErrClosed
}

func (pipes) Close() error   { return nil }
func (pipes) Addr() net.Addr { return &net.TCPAddr{} }

// say sends text unchanged and returns the status line and the rest of the answer.
func (g *guarded) say(text io.Reader) string {
	g.t.Helper()
	conn, theirs := net.Pipe()
	defer conn.Close()
	g.conns <- theirs
	sent := make(chan struct{})
	go func() {
		defer close(sent)
		_, _ = io.Copy(conn, text) // the server may not read all of it
	}()
	res, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		g.t.Errorf("no answer: %v", err)
		return ""
	}
	body, _ := io.ReadAll(io.LimitReader(res.Body, 1<<16))
	_ = conn.Close()
	<-sent
	return res.Status + " " + string(body)
}

const head = "POST /things HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"

// Every malformed request gets its code and never reaches the store.
func TestBadInputOverTheWire(t *testing.T) {
	t.Parallel()
	key := "Idempotency-Key: " + goodKey + "\r\n"
	for name, tt := range map[string]struct {
		text io.Reader
		want string // in the answer
	}{
		"no key":             {strings.NewReader(head + "Content-Length: 0\r\n\r\n"), "400 Bad Request " + `{"code":"IDEMPOTENCY_KEY_REQUIRED"`},
		"empty key":          {strings.NewReader(head + "Idempotency-Key:\r\nContent-Length: 0\r\n\r\n"), "IDEMPOTENCY_KEY_INVALID"},
		"two keys":           {strings.NewReader(head + key + key + "Content-Length: 0\r\n\r\n"), "IDEMPOTENCY_KEY_INVALID"},
		"two spellings":      {strings.NewReader(head + key + "idempotency-key: " + goodKey + "\r\nContent-Length: 0\r\n\r\n"), "IDEMPOTENCY_KEY_INVALID"},
		"control byte":       {strings.NewReader(head + "Idempotency-Key: \x01" + goodKey[1:] + "\r\nContent-Length: 0\r\n\r\n"), "400 Bad Request"},
		"half quoted":        {strings.NewReader(head + "Idempotency-Key: \"" + goodKey + "\r\nContent-Length: 0\r\n\r\n"), "IDEMPOTENCY_KEY_INVALID"},
		"key of 64 KiB":      {strings.NewReader(head + "Idempotency-Key: " + strings.Repeat("a", 64<<10) + "\r\nContent-Length: 0\r\n\r\n"), "IDEMPOTENCY_KEY_INVALID"},
		"header of 4 MiB":    {strings.NewReader(head + key + "X: " + strings.Repeat("a", 4<<20) + "\r\n\r\n"), "431 "},
		"100,000 headers":    {strings.NewReader(head + key + strings.Repeat("X: aaaaaaaaaaaaaaaa\r\n", 100_000) + "\r\n"), "431 "},
		"declared 100 MB":    {strings.NewReader(head + key + "Content-Length: 100000000\r\n\r\nx"), "413 Request Entity Too Large " + `{"code":"REQUEST_TOO_LARGE"`},
		"sent 100 MB":        {io.MultiReader(strings.NewReader(head+key+"Content-Length: 100000000\r\n\r\n"), io.LimitReader(endless{}, 100_000_000)), "413 "},
		"endless chunks":     {io.MultiReader(strings.NewReader(head+key+"Transfer-Encoding: chunked\r\n\r\n"), chunks{}), "413 "},
		"chunks that stop":   {io.MultiReader(strings.NewReader(head+key+"Transfer-Encoding: chunked\r\n\r\n5\r\nabcde\r\n"), stuck{}), `400 Bad Request {"code":"INVALID_REQUEST"`},
		"malformed chunk":    {strings.NewReader(head + key + "Transfer-Encoding: chunked\r\n\r\nZ\r\n"), `400 Bad Request {"code":"INVALID_REQUEST"`},
		"shorter than said":  {io.MultiReader(strings.NewReader(head+key+"Content-Length: 10\r\n\r\nabc"), stuck{}), `400 Bad Request {"code":"INVALID_REQUEST"`},
		"declared 2^63 more": {strings.NewReader(head + key + "Content-Length: 9223372036854775808\r\n\r\n"), "400 Bad Request"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				g := guard(t)
				if got := g.say(tt.text); !strings.Contains(got, tt.want) {
					t.Errorf("answer %.300q; want %q", got, tt.want)
				}
				if g.begun.Load() != 0 || g.ran.Load() != 0 {
					t.Errorf("the store was called %d times, the handler ran %d times", g.begun.Load(), g.ran.Load())
				}
			})
		})
	}
}

// chunks never ends.
type chunks struct{}

func (chunks) Read(p []byte) (int, error) {
	const chunk = "400\r\n"
	if len(p) < 2048 {
		return copy(p, "1\r\nx\r\n"), nil
	}
	n := copy(p, chunk) + 1024
	return n + copy(p[n:], "\r\n"), nil
}

// stuck sends nothing for longer than the server waits.
type stuck struct{}

func (stuck) Read([]byte) (int, error) {
	time.Sleep(time.Minute) // timing: in a bubble
	return 0, io.EOF
}

// Unusual but valid bodies reach the handler unchanged.
func TestOddBodies(t *testing.T) {
	t.Parallel()
	var bomb bytes.Buffer
	z := gzip.NewWriter(&bomb)
	_, _ = io.CopyN(z, endless{}, 10<<20)
	_ = z.Close()
	for name, tt := range map[string]struct{ head, body string }{
		"no body":       {"", ""},
		"invalid UTF-8": {"", "\xff\xfe{"},
		"gzip bomb":     {"Content-Encoding: gzip\r\n", bomb.String()},
		"deep JSON":     {"", strings.Repeat("[", 60<<10)},
		"many members":  {"", `{"a":` + strings.Repeat(`{"a":`, 9000)},
		"at the limit":  {"", strings.Repeat("x", 64<<10)},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				g := guard(t)
				text := fmt.Sprintf("%sIdempotency-Key: %s\r\n%sContent-Length: %d\r\n\r\n%s", head, goodKey, tt.head, len(tt.body), tt.body)
				for range 2 {
					if got, want := g.say(strings.NewReader(text)), fmt.Sprintf("200 OK %d", len(tt.body)); got != want {
						t.Errorf("answer %.200q; want %q", got, want)
					}
				}
				if g.ran.Load() != 1 {
					t.Errorf("the handler ran %d times", g.ran.Load())
				}
			})
		})
	}
}

// A rejected request takes no more memory than its limit.
func TestBodiesAreBounded(t *testing.T) {
	const limit, requests = 1 << 20, 50
	h := protect(t, idempotencytest.NewStore(), idempotency.MiddlewareConfig{MaxRequestBytes: limit}, unreached(t))
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	for range requests {
		r := post(goodKey, endless{})
		r.ContentLength = -1
		wantCode(t, "endless", send(h, r), 413, "REQUEST_TOO_LARGE")
	}
	runtime.ReadMemStats(&after)
	if each := (after.TotalAlloc - before.TotalAlloc) / requests; each > 6*limit { // a growing slice is copied
		t.Errorf("%d bytes for each request above the limit of %d", each, limit)
	}
}

// FuzzMiddleware checks that every request is answered by one of the listed codes or by the handler, without a panic,
// and that the same request gets the same answer again.
func FuzzMiddleware(f *testing.F) {
	f.Add("POST", goodKey, "/a?b=c", "application/json", []byte(`{"a":1}`))
	f.Add("PUT", `"`+goodKey+`"`, "/%zz?%zz;", "a/b; c", []byte{0xff})
	f.Add("PATCH", "", "//x", ";", []byte(nil))
	f.Fuzz(func(t *testing.T, method, key, target, contentType string, body []byte) {
		runs := 0
		h := protect(t, idempotencytest.NewStore(), idempotency.MiddlewareConfig{CanonicalJSON: true, MaxRequestBytes: 1000},
			func(w http.ResponseWriter, _ *http.Request) { runs++; w.WriteHeader(http.StatusCreated) })
		request := func() *http.Request {
			r := httptest.NewRequest(http.MethodPost, "/", bytes.NewReader(body))
			r.Method, r.RequestURI = method, target
			r.URL.Path, r.URL.RawQuery, _ = strings.Cut(target, "?")
			r.Header[idempotency.Header] = []string{key}
			r.Header.Set("Content-Type", contentType)
			return r
		}
		first, again := send(h, request()), send(h, request())
		switch {
		case first.Code == 201 && again.Code == 201:
			needed := slices.Contains([]string{"POST", "PUT", "PATCH"}, method)
			if needed && runs != 1 || needed != (again.Header().Get(idempotency.ReplayedHeader) == "true") {
				t.Errorf("%d runs, headers %v", runs, again.Header())
			}
		case first.Code != again.Code || first.Body.String() != again.Body.String() || runs != 0:
			t.Errorf("first %d %s, again %d %s, %d runs", first.Code, first.Body, again.Code, again.Body, runs)
		case !strings.Contains(first.Body.String(), `"code":"`):
			t.Errorf("answer %d %s", first.Code, first.Body)
		}
	})
}
