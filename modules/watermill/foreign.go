package watermillbridge

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	"mime"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/holdfast-go/holdfast/outbox/driver"
)

// The limits of outbox.Message, and how much of them metadata may use. The rest is for the headers of this
// package and of the trace.
const (
	maxName      = 128
	maxValue     = 4 << 10
	maxAll       = 12 << 10
	maxMetadata  = 56
	maxKey       = 255
	maxMediaType = 127
)

// Headers of this package. Metadata with these names is dropped.
const (
	// headerUUID has the UUID of a message with another id.
	headerUUID = "watermill-uuid"
	// headerType has a content type that contradicts the payload or the grammar.
	headerType = "watermill-content-type"
	// headerKey has an ordering key that an outbox rejects.
	headerKey = "watermill-ordering-key"
	// headerEscaped has the names of escaped headers, separated by spaces.
	headerEscaped = "watermill-escaped"
	// headerLeftOut is the number of metadata entries that did not fit.
	headerLeftOut = "watermill-left-out"
)

// cutMark is the end of a value that was cut.
const cutMark = "…"

// carried converts metadata to headers that an outbox accepts, whatever texts it contains. A name or value that no
// header may have is escaped and listed in headerEscaped. A value that is too long is cut. Entries beyond the
// limits are counted in headerLeftOut.
func carried(metadata map[string]string) map[string]string {
	headers := make(map[string]string, len(metadata)+2)
	var escaped []string
	room, leftOut := maxAll, 0
	for _, name := range inOrder(metadata) {
		header, value, escapes := name, cut(metadata[name]), 0
		if !isName(name) || !isText(value) {
			header, value = escapeName(name), escape(metadata[name])
			escapes = len(header) + 1 // in headerEscaped
		}
		size := len(header) + len(value) + escapes
		if len(header) > maxName || len(headers) == maxMetadata || size > room {
			leftOut++
			continue
		}
		headers[header] = value
		room -= size
		if escapes > 0 {
			escaped = append(escaped, header)
		}
	}
	if len(escaped) > 0 {
		headers[headerEscaped] = strings.Join(escaped, " ")
	}
	if leftOut > 0 {
		headers[headerLeftOut] = strconv.Itoa(leftOut)
	}
	return headers
}

// inOrder returns the names of metadata. The ones with the reason why a message was given up come first.
func inOrder(metadata map[string]string) []string {
	last := func(name string) int {
		if strings.HasSuffix(name, "_poisoned") || name == headerUUID || name == headerType || name == headerKey {
			return 0
		}
		return 1
	}
	return slices.SortedFunc(maps.Keys(metadata), func(a, b string) int {
		return cmp.Or(cmp.Compare(last(a), last(b)), cmp.Compare(a, b))
	})
}

// restored returns the metadata of headers made by carried.
func restored(headers map[string]string) map[string]string {
	metadata := make(map[string]string, len(headers))
	escaped := strings.Fields(headers[headerEscaped])
	for name, value := range headers {
		if slices.Contains(escaped, name) {
			name, value = unescapeName(name), unescape(value)
		}
		metadata[name] = value
	}
	delete(metadata, headerEscaped)
	return metadata
}

// cut returns a value of at most maxValue bytes.
func cut(value string) string {
	if len(value) <= maxValue {
		return value
	}
	n := maxValue - len(cutMark)
	for n > 0 && !utf8.RuneStart(value[n]) {
		n--
	}
	return value[:n] + cutMark
}

// escape quotes a value as strconv.Quote does, without the quotation marks. It cuts between characters.
func escape(value string) string {
	var text strings.Builder
	for len(value) > 0 {
		_, n := utf8.DecodeRuneInString(value)
		quoted := strconv.Quote(value[:n])
		quoted = quoted[1 : len(quoted)-1]
		if text.Len()+len(quoted) > maxValue-len(cutMark) {
			return text.String() + cutMark
		}
		text.WriteString(quoted)
		value = value[n:]
	}
	return text.String()
}

// unescape undoes escape. It returns other texts as they are.
func unescape(text string) string {
	value, err := strconv.Unquote(`"` + text + `"`)
	if err != nil {
		return text
	}
	return value
}

// escapeName returns a name with %XX for each byte that the name of a header may not have, and for the first byte of
// a reserved name. The empty name is "%".
func escapeName(name string) string {
	if name == "" {
		return "%"
	}
	var text strings.Builder
	for i := range len(name) {
		if c := name[i]; c <= ' ' || c > '~' || c == '%' || i == 0 && driver.Reserved(name) {
			fmt.Fprintf(&text, "%%%02X", c)
		} else {
			text.WriteByte(c)
		}
	}
	return text.String()
}

// unescapeName undoes escapeName. It returns other texts as they are.
func unescapeName(text string) string {
	if text == "%" {
		return ""
	}
	name, err := url.PathUnescape(text)
	if err != nil {
		return text
	}
	return name
}

func isName(name string) bool {
	for i := range len(name) {
		if name[i] <= ' ' || name[i] > '~' {
			return false
		}
	}
	return name != "" && len(name) <= maxName && !driver.Reserved(name)
}

func isText(text string) bool {
	return utf8.ValidString(text) && !strings.ContainsFunc(text, unicode.IsControl)
}

// fits reports whether an outbox accepts a payload with this content type.
func fits(contentType string, payload []byte) bool {
	media, _, err := mime.ParseMediaType(contentType)
	odd := strings.ContainsFunc(contentType, func(r rune) bool { return r < ' ' || r > '~' })
	if err != nil || odd || len(contentType) > maxMediaType || !strings.Contains(media, "/") {
		return false
	}
	isJSON := media == typeJSON || strings.HasSuffix(media, "+json")
	return !isJSON || utf8.Valid(payload) && json.Valid(payload)
}

// keyOf returns an ordering key that an outbox accepts, the same one for the same text.
func keyOf(text string) string {
	if len(text) <= maxKey && isText(text) {
		return text
	}
	sum := sha256.Sum256([]byte(text))
	return "sha256-" + hex.EncodeToString(sum[:])
}
