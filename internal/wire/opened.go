package wire

import "maps"

// Opened returns headers, body and content type of a message as they are; or, of one that Symfony's
// PhpSerializer has written, as its other serializer would have sent it; or of a structured CloudEvent as
// its binary form. False: the body is an envelope that cannot be read, and everything as it is.
func Opened(headers map[string]string, body []byte, contentType string) (map[string]string, []byte, string, bool) {
	if isEnvelope(contentType) {
		if all, data, dataType, ok := open(body, contentType, headers); ok {
			return all, data, dataType, true
		}
		return headers, body, contentType, false
	}
	fromPHP, properties, ok := FromPHP(body)
	if !ok {
		return headers, body, contentType, true
	}
	maps.Copy(fromPHP, headers)
	return fromPHP, properties, JSON, true
}
