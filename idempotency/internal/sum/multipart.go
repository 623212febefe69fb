package sum

import (
	"bytes"
	"mime"
	"strings"
)

// isMultipart reports whether a media type has parts between boundaries, as the forms of browsers have.
func isMultipart(media string) bool { return strings.HasPrefix(media, "multipart/") }

// parts returns what is between the boundaries of a multipart body: a client chooses a new boundary each time it
// sends the same form. It returns false for a body that two readers may divide differently.
func parts(contentType string, body []byte) ([][]byte, bool) {
	_, params, err := mime.ParseMediaType(contentType)
	if err != nil || params["boundary"] == "" {
		return nil, false
	}
	boundary := []byte("--" + params["boundary"])
	body, found := bytes.CutPrefix(body, boundary)
	if !found {
		return nil, false
	}
	all := bytes.Split(body, append([]byte("\r\n"), boundary...))
	for _, part := range all {
		if !bytes.HasPrefix(part, []byte("\r\n")) && !bytes.HasPrefix(part, []byte("--")) {
			return nil, false
		}
	}
	return all, true
}
