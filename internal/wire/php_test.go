package wire_test

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"maps"
	"runtime"
	"strings"
	"testing"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/internal/wire"
	"github.com/holdfast-go/holdfast/outbox/format"
)

// envelope is the output of PhpSerializer of Symfony 5.4 for a message Msg with one property, a.
func envelope(value string) string {
	return `O:36:\"Symfony\\Component\\Messenger\\Envelope\":2:{s:44:\"\0Symfony\\Component\\Messenger\\Envelope\0stamps\";a:0:{}s:45:\"\0Symfony\\Component\\Messenger\\Envelope\0message\";O:3:\"Msg\":1:{s:1:\"a\";` + value + `}}`
}

// base64Envelope is the same with a text that is not UTF-8.
const base64Envelope = `TzozNjpcIlN5bWZvbnlcXENvbXBvbmVudFxcTWVzc2VuZ2VyXFxFbnZlbG9wZVwiOjI6e3M6NDQ6XCJcMFN5bWZvbnlcXENvbXBvbmVudFxcTWVzc2VuZ2VyXFxFbnZlbG9wZVwwc3RhbXBzXCI7YTowOnt9czo0NTpcIlwwU3ltZm9ueVxcQ29tcG9uZW50XFxNZXNzZW5nZXJcXEVudmVsb3BlXDBtZXNzYWdlXCI7TzozOlwiTXNnXCI6MTp7czoxOlwiYVwiO3M6NjpcImJ5dGVz/1wiO319`

// FromPHP turns a body of PHP's own serializer into the form of Symfony's other serializer.
func TestFromPHP(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		body string
		want string // of the property; "": the body is rejected
	}{
		"integer":    {envelope(`i:1;`), `1`},
		"negative":   {envelope(`i:-7;`), `-7`},
		"float":      {envelope(`d:0.5;`), `0.5`},
		"huge":       {envelope(`d:1.0E+100;`), `1.0E+100`},
		"minus zero": {envelope(`d:-0;`), `-0`},
		"true":       {envelope(`b:1;`), `true`},
		"false":      {envelope(`b:0;`), `false`},
		"null":       {envelope(`N;`), `null`},
		"text":       {envelope(`s:7:\"x\"y\\z\0n\";`), `"x\"y\\z\u0000n"`},
		"unicode":    {envelope(`s:5:\"ü€\";`), `"ü€"`},
		"map":        {envelope(`a:2:{s:1:\"k\";i:1;i:3;s:1:\"x\";}`), `{"k":1,"3":"x"}`},
		"empty":      {envelope(`a:0:{}`), `[]`},
		"lists":      {envelope(`a:2:{i:0;a:1:{i:0;i:1;}i:1;a:1:{s:1:\"a\";a:0:{}}}`), `[[1],{"a":[]}]`},
		"object":     {envelope(`O:5:\"Inner\":3:{s:8:\"\0Inner\0p\";i:1;s:4:\"\0*\0q\";a:2:{i:0;i:1;i:1;a:1:{i:0;i:2;}}s:1:\"r\";N;}`), `{"p":1,"q":[1,[2]],"r":null}`},
		"enum":       {envelope(`E:11:\"Status:Open\";`), `"Open"`},
		"from one":   {envelope(`a:2:{i:1;s:1:\"a\";i:2;s:1:\"b\";}`), `{"1":"a","2":"b"}`},
		"bytes":      {base64Envelope, ``},
		"infinite":   {envelope(`d:INF;`), ``},
		"reference":  {envelope(`a:2:{i:0;O:5:\"Inner\":3:{s:8:\"\0Inner\0p\";i:1;s:4:\"\0*\0q\";a:2:{i:0;i:1;i:1;a:1:{i:0;i:2;}}s:1:\"r\";N;}i:1;r:5;}`), ``},

		"a list that goes on as a map": {envelope(`a:3:{i:0;a:1:{i:0;i:7;}i:1;s:1:\"x\";s:1:\"k\";N;}`), `{"0":[7],"1":"x","k":null}`},
		"a list with a gap":            {envelope(`a:2:{i:0;i:1;i:2;i:3;}`), `{"0":1,"2":3}`},
		"a number that is none":        {envelope(`i:"7";`), ``},
		"a length beyond the end":      {envelope(`s:99999999999999999999:\"x\";`), ``},
		"a wrong length":               {envelope(`s:2:\"x\";`), ``},
		"more elements than there are": {envelope(`a:1000000000:{}`), ``},
		"nested too deep":              {envelope(strings.Repeat("a:1:{i:0;", 100) + "N;" + strings.Repeat("}", 100)), ``},
		"something behind it":          {envelope(`N;`) + "x", ``},
		"an object with code":          {envelope(`C:1:\"X\":0:{}`), ``},
		"no envelope":                  {`O:3:\"Msg\":0:{}`, ``},
		"JSON":                         {`{"a":1}`, ``},
		"cut short":                    {strings.TrimSuffix(envelope(`N;`), `}}`), ``},
	} {
		headers, body, ok := wire.FromPHP([]byte(tt.body))
		if ok != (tt.want != "") {
			t.Errorf("%s: taken %v: %s", name, ok, body)
			continue
		}
		if ok && (string(body) != `{"a":`+tt.want+`}` || !json.Valid(body) || !maps.Equal(headers, map[string]string{"type": "Msg"})) {
			t.Errorf("%s: %s with %v, want %s", name, body, headers, tt.want)
		}
	}
}

func TestFromPHPStamps(t *testing.T) {
	t.Parallel()
	body := strings.Replace(envelope(`N;`), `a:0:{}`, `a:1:{s:28:\"App\\Messenger\\MessageIdStamp\";a:1:{i:0;O:28:\"App\\Messenger\\MessageIdStamp\":1:{s:9:\"messageId\";s:36:\"`+a+`\";}}}`, 1)
	headers, _, ok := wire.FromPHP([]byte(body))
	s := newSymfony(t, format.Symfony{Classes: map[string]string{"msg.sent": "Msg"}})
	if !ok || s.ID("", headers) != uuid.MustParse(a) || s.Name("", headers) != "msg.sent" {
		t.Errorf("headers %v, %v", headers, ok)
	}
}

// Symfony 8.2 keeps the id in a private property called id.
func TestFromPHPStamps_ofSymfony(t *testing.T) {
	t.Parallel()
	const class = `Symfony\\Component\\Messenger\\Stamp\\MessageIdStamp`
	property := `s:52:\"\0` + class + `\0id\"`
	body := strings.Replace(envelope(`N;`), `a:0:{}`, `a:1:{s:48:\"`+class+`\";a:1:{i:0;O:48:\"`+class+`\":1:{`+property+`;s:36:\"`+a+`\";}}}`, 1)
	headers, _, ok := wire.FromPHP([]byte(body))
	if s := newSymfony(t, format.Symfony{}); !ok || s.ID("", headers) != uuid.MustParse(a) {
		t.Errorf("headers %v, %v", headers, ok)
	}
}

// The output is bounded while it is written, even if the body grows as JSON.
func TestFromPHPBounded(t *testing.T) {
	const mib = 1 << 20
	text := func(of string, n int) string { return fmt.Sprintf(`s:%d:\"%s\";`, n*len(of), strings.Repeat(of, n)) }
	late := strings.Repeat(`a:2:{i:0;`, 60) + text("x", 15*mib) + strings.Repeat(`s:1:\"k\";N;}`, 60) // each turns out to be a map
	for name, tt := range map[string]struct {
		value string
		taken bool
	}{
		"letters":             {text("x", 15*mib), true},
		"control characters":  {text("\x01", 15*mib), false},
		"a long list":         {`a:1:{i:0;` + text("\x01", 15*mib) + `}`, false},
		"lists that are maps": {late, true},
		"too long as it is":   {text("x", 16*mib), false},
	} {
		body := []byte(envelope(tt.value))
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		_, properties, ok := wire.FromPHP(body)
		runtime.ReadMemStats(&after)
		if ok != tt.taken || ok && !json.Valid(properties) {
			t.Errorf("%s: taken %v", name, ok)
		}
		if used := (after.TotalAlloc - before.TotalAlloc) / mib; used > 160 {
			t.Errorf("%s: %d MiB were allocated", name, used)
		}
	}
}

// adversary returns a body of about size bytes. A reader that moves written bytes, or reads ahead for each value, would
// need time that grows with the square of the size.
func adversary(kind string, size int) []byte {
	fill := func(n int) string { return fmt.Sprintf(`s:%d:\"%s\";`, n, strings.Repeat("x", n)) }
	// Each level has private properties of a parent class before the large one, and own properties of the same names
	// after it.
	level := func(value string) string {
		var above, own strings.Builder
		for i := range 400 {
			fmt.Fprintf(&above, `s:8:\"\0Top\0%03d\";N;`, i)
			fmt.Fprintf(&own, `s:3:\"%03d\";N;`, i)
		}
		return `O:5:\"Child\":801:{` + above.String() + `s:1:\"v\";` + value + own.String() + `}`
	}
	const depth = 58
	switch kind {
	case "hidden properties, nested":
		value := fill(size - depth*len(level("")))
		for range depth {
			value = level(value)
		}
		return []byte(envelope(value))
	case "hidden properties, many objects":
		n := size / len(level("N;"))
		var all strings.Builder
		for i := range n {
			fmt.Fprintf(&all, `i:%d;%s`, i, level("N;"))
		}
		return []byte(envelope(fmt.Sprintf(`a:%d:{%s}`, n, all.String())))
	case "lists that are maps after all":
		return []byte(envelope(strings.Repeat(`a:2:{i:0;`, depth) + fill(size) + strings.Repeat(`s:1:\"k\";N;}`, depth)))
	case "digits":
		return []byte(envelope(`s:` + strings.Repeat("1", size)))
	case "stamps":
		return []byte(withStamps(fmt.Sprintf(`a:%d:{%s}`, size/30, strings.Repeat(`s:1:"Z";a:1:{i:0;N;}`, size/30))))
	}
	panic(kind)
}

// A reader that moved written bytes took 113 s for 15 MiB; it would not finish this test.
func TestFromPHP_readsAdversariesInLinearTime(t *testing.T) {
	t.Parallel()
	for kind, taken := range map[string]bool{
		"hidden properties, nested": true, "hidden properties, many objects": true, "lists that are maps after all": true,
		"digits": false, "stamps": true,
	} {
		body := adversary(kind, 4<<20)
		_, properties, ok := wire.FromPHP(body)
		if ok != taken || ok && !json.Valid(properties) {
			t.Errorf("%s: taken %v: %.100s", kind, ok, properties)
		}
	}
}

// Without Symfony's format, PHP bodies are left alone.
func TestOpened_leavesPHPToSymfony(t *testing.T) {
	t.Parallel()
	plain, _ := wire.NewForm(nil)
	asked, _ := wire.NewForm(format.Symfony{})
	body := []byte(envelope(`N;`))
	if _, same, typ, ok := plain.Symfony.Opened(nil, body, ""); string(same) != string(body) || typ != "" || !ok {
		t.Errorf("without a format: %s, %q, %v", same, typ, ok)
	}
	if _, opened, typ, ok := asked.Symfony.Opened(nil, body, ""); string(opened) != `{"a":null}` || typ != wire.JSON || !ok {
		t.Errorf("with it: %s, %q, %v", opened, typ, ok)
	}
	large := []byte(envelope(fmt.Sprintf(`s:100000:\"%s\";`, strings.Repeat("x", 100_000))))
	if plain.Symfony.Slow(large, "") || !asked.Symfony.Slow(large, "") || asked.Symfony.Slow(body, "") {
		t.Error("a wrong body is slow")
	}
}

// withStamps is an envelope with stamps, serialized as in PHP before it adds backslashes.
func withStamps(stamps string) string {
	slashed := strings.NewReplacer(`\`, `\\`, `"`, `\"`, "\x00", `\0`).Replace(stamps)
	return strings.Replace(envelope(`N;`), `a:0:{}`, slashed, 1)
}

// A message is accepted whatever its stamps contain. Stamps that fit become headers.
func TestFromPHPForeignStamps(t *testing.T) {
	t.Parallel()
	one := func(class, value string) string {
		return fmt.Sprintf(`s:%d:"%s";a:1:{i:0;O:1:"X":1:{s:1:"v";%s}}`, len(class), class, value)
	}
	var many strings.Builder
	for i := range 100 {
		many.WriteString(one(fmt.Sprint("S", i), "N;"))
	}
	long := fmt.Sprintf(`s:10000:"%s";`, strings.Repeat("x", 10000))
	for name, tt := range map[string]struct {
		stamps string
		want   string // of the header of class Z; "": no header
		count  int
	}{
		"Latin-1":          {`a:1:{` + one("Z", "s:2:\"f\xfc\";") + `}`, `[{"v":"f` + "\uFFFD" + `"}]`, 1},
		"infinite":         {`a:1:{` + one("Z", "d:-INF;") + `}`, `[{"v":null}]`, 1},
		"a reference":      {`a:2:{` + one("A", "N;") + one("Z", "r:3;") + `}`, `[{"v":null}]`, 2},
		"one twice":        {`a:1:{s:1:"Z";a:2:{i:0;O:1:"X":1:{s:1:"v";i:1;}i:1;r:4;}}`, `[{"v":1}]`, 1},
		"a long one":       {`a:2:{` + one("A", long) + one("Z", "i:1;") + `}`, `[{"v":1}]`, 1},
		"a long list":      {`a:2:{` + one("A", `a:3:{i:0;`+long+`i:1;i:2;s:1:"k";N;}`) + one("Z", "i:1;") + `}`, `[{"v":1}]`, 1},
		"no class":         {`a:3:{` + one("a b", "N;") + one(strings.Repeat("x", 300), "N;") + one("Z", "i:1;") + `}`, `[{"v":1}]`, 1},
		"a hundred":        {`a:101:{` + one("Z", "i:1;") + many.String() + `}`, `[{"v":1}]`, 64},
		"a class of bytes": {`a:2:{` + one("\xff", "N;") + one("Z", "i:1;") + `}`, `[{"v":1}]`, 1},
	} {
		headers, body, ok := wire.FromPHP([]byte(withStamps(tt.stamps)))
		if !ok || string(body) != `{"a":null}` || headers["X-Message-Stamp-Z"] != tt.want || len(headers) != tt.count+1 {
			t.Errorf("%s: %v, %s with %.500v", name, ok, body, headers)
		}
	}
	encoded := base64.StdEncoding.EncodeToString([]byte(withStamps(`a:1:{` + one("Z", "s:1:\"\xfc\";") + `}`)))
	if headers, body, ok := wire.FromPHP([]byte(encoded)); !ok || string(body) != `{"a":null}` || headers["X-Message-Stamp-Z"] == "" {
		t.Errorf("in base64: %v, %s with %v", ok, body, headers)
	}
}

// Of private properties with one name, the property of the object's own class wins, in either order.
func TestFromPHPPrivate(t *testing.T) {
	t.Parallel()
	object := func(properties string) string { return envelope(`O:5:\"Child\":3:{` + properties + `}`) }
	above, other, own, seen := `s:6:\"\0Top\0p\";i:1;`, `s:6:\"\0Mid\0p\";i:2;`, `s:8:\"\0Child\0p\";i:3;`, `s:4:\"\0*\0q\";i:4;`
	for body, want := range map[string]string{
		object(above + own + seen):                         `{"p":3,"q":4}`,
		object(own + above + seen):                         `{"p":3,"q":4}`,
		object(seen + above + own):                         `{"q":4,"p":3}`,
		object(above + seen + own):                         `{"q":4,"p":3}`,
		object(above + seen + `s:1:\"p\";i:5;`):            `{"q":4,"p":5}`,
		object(above + other + seen):                       ``,
		envelope(`O:5:\"Child\":2:{` + above + seen + `}`): `{"p":1,"q":4}`,
	} {
		_, properties, ok := wire.FromPHP([]byte(body))
		if ok != (want != "") || ok && string(properties) != `{"a":`+want+`}` {
			t.Errorf("%s: %v, %s, want %s", body, ok, properties, want)
		}
	}
}

// Any accepted body yields JSON that is not much longer.
func FuzzFromPHP(f *testing.F) {
	f.Add([]byte(envelope(`a:3:{i:0;a:1:{i:0;i:7;}i:1;s:1:\"x\";s:1:\"k\";N;}`)))
	f.Add([]byte(base64Envelope))
	f.Fuzz(func(t *testing.T, body []byte) {
		_, properties, ok := wire.FromPHP(body)
		if ok && (!json.Valid(properties) || len(properties) > 8*len(body)) {
			t.Errorf("%q became %q", body, properties)
		}
	})
}
