// Package form is how a message looks on NATS: headers as texts, whatever their names and values are.
package form

import (
	"encoding/json"
	"maps"
	"strings"

	"github.com/nats-io/nats.go"

	"github.com/holdfast-go/holdfast/internal/wire"
)

// The headers of a message besides the sender's. The id is in Nats-Msg-Id. A copy has another value there, and the id in header ID.
const (
	ID              = "holdfast-id"
	Name            = "holdfast-name"
	CreatedAt       = "holdfast-created-at"
	ContentType     = "Content-Type"
	ContentEncoding = "Content-Encoding"
	CorrelationID   = "Correlation-Id"
	ReplyTo         = "Reply-To"
	// others has, as a JSON object, the headers that NATS cannot carry as they are.
	others = "holdfast-headers"

	eventPrefix    = "ce-"
	maxOthersBytes = 1 << 20
)

// Sent reports whether a header is the sender's own.
func Sent(name string) bool {
	switch name {
	case ID, Name, CreatedAt, ContentType, ContentEncoding, CorrelationID, ReplyTo:
		return false
	}
	return !wire.Own(name)
}

// Encode returns headers for the wire. The names of attributes of a CloudEvent begin with wire.EventPrefix in all.
func Encode(all map[string]string) nats.Header {
	header := make(nats.Header, len(all)+1)
	var packed map[string]string
	for name, value := range all {
		sent := name
		if attribute, ok := strings.CutPrefix(name, wire.EventPrefix); ok {
			sent = eventPrefix + attribute
		}
		if plain(sent, value) {
			header[sent] = []string{value}
			continue
		}
		if packed == nil {
			packed = map[string]string{}
		}
		packed[name] = value
	}
	if packed != nil {
		text, _ := json.Marshal(packed) // texts have no errors
		header[others] = []string{string(text)}
	}
	return header
}

// plain reports whether NATS carries a header as it is, and gives it no meaning. Clients reject all other names.
func plain(name, value string) bool {
	return name != "" && !strings.ContainsFunc(name, unfit) && !strings.HasPrefix(name, "Nats-") && name != "Status" && name != others &&
		!strings.ContainsAny(value, "\r\n") && strings.TrimSpace(value) == value
}

// unfit reports whether a name must not have a character: all but visible ASCII, and the separators of nats.go.
func unfit(r rune) bool { return r <= ' ' || r > '~' || strings.ContainsRune("\"()/,:;<=>?@[\\]{}", r) }

// Decode returns what Encode was given, and the id of a message that names it in Nats-Msg-Id alone. It leaves out values
// that are not UTF-8 or have more than 8 KiB.
func Decode(header nats.Header) map[string]string {
	all := make(map[string]string, len(header))
	for name, values := range header {
		if len(values) == 0 || strings.HasPrefix(name, "Nats-") || name == others {
			continue
		}
		value, ok := wire.HeaderString(values[0])
		if !ok {
			continue
		}
		if attribute, event := strings.CutPrefix(name, eventPrefix); event {
			if known, text, ok := wire.EventField(wire.EventFieldPrefix+attribute, value); ok {
				name, value = known, text
			}
		}
		all[name] = value
	}
	if text := header[others]; len(text) > 0 && len(text[0]) <= maxOthersBytes {
		var packed map[string]string
		if json.Unmarshal([]byte(text[0]), &packed) == nil {
			maps.Copy(all, packed)
		}
	}
	if id := header[nats.MsgIdHdr]; all[ID] == "" && len(id) > 0 {
		if text, ok := wire.HeaderString(id[0]); ok {
			all[ID] = text
		}
	}
	return all
}
