package wire

import (
	"bytes"
	"maps"
)

// slowBody is the length from which decoding a body takes about a millisecond or more.
const slowBody = 64 << 10

// Opened returns headers, body and content type of a message as they are. A structured CloudEvent becomes
// its binary form. Where the format is Symfony's, a body of Symfony's PhpSerializer becomes what its other serializer
// would have sent. False: the body is an envelope that cannot be read, and everything is as it was. Its time and
// memory grow with the length of the body.
func (s *Symfony) Opened(headers map[string]string, body []byte, contentType string) (map[string]string, []byte, string, bool) {
	if isEnvelope(contentType) {
		if all, data, dataType, ok := open(body, contentType, headers); ok {
			return all, data, dataType, true
		}
		return headers, body, contentType, false
	}
	if !s.php {
		return headers, body, contentType, true
	}
	fromPHP, properties, ok := FromPHP(body)
	if !ok {
		return headers, body, contentType, true
	}
	maps.Copy(fromPHP, headers)
	return fromPHP, properties, JSON, true
}

// Slow reports whether Opened decodes so much that it does not belong on a goroutine that others wait for.
func (s *Symfony) Slow(body []byte, contentType string) bool {
	return len(body) > slowBody && (isEnvelope(contentType) || s.php && isPHP(body))
}

// isPHP reports whether a body begins as PhpSerializer's do.
func isPHP(body []byte) bool {
	return bytes.HasPrefix(body, []byte(envelopeStart)) || bytes.HasPrefix(body, []byte(envelopeStart64))
}

// SlowText reports whether a text of a message, such as JSON with its headers, is too long to be decoded on a
// goroutine that others wait for.
func SlowText(text string) bool { return len(text) > slowBody }
