package idempotency

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"io"
	"slices"
	"strings"
	"unicode/utf8"
)

// node is a JSON value. Its sum does not depend on white space, the order of
// members, and the way a string is escaped. A number counts as it is written: 1
// and 1.0 may be different amounts to somebody.
type node struct {
	kind     byte   // { [ " or, with the value in text, 0 for numbers, true, false and null
	text     string // of a string or a bare value
	children []node // of an array, or of an object in the order of their names
	name     string // as a member of an object
}

// maxDepth bounds the recursion over a document.
const maxDepth = 1000

// parseJSON returns nil for what has no canonical form and counts as raw bytes:
// what is no JSON document, and what two readers may understand differently (a
// name that is there twice, text that is not Unicode).
func parseJSON(body []byte) *node {
	if !utf8.Valid(body) {
		return nil
	}
	d := json.NewDecoder(bytes.NewReader(body))
	d.UseNumber()
	doc, ok := parseValue(d, maxDepth)
	if !ok {
		return nil
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return nil
	}
	return &doc
}

func parseValue(d *json.Decoder, depth int) (n node, ok bool) {
	token, err := d.Token()
	if err != nil || depth == 0 {
		return n, false
	}
	switch v := token.(type) {
	case json.Delim:
		n.kind = byte(v)
		return n, n.parseChildren(d, depth-1)
	case string:
		n.kind, n.text = '"', v
		return n, unicodeOnly(v)
	case json.Number:
		n.text = v.String()
	case bool:
		n.text = "false"
		if v {
			n.text = "true"
		}
	default:
		n.text = "null"
	}
	return n, true
}

func (n *node) parseChildren(d *json.Decoder, depth int) bool {
	for d.More() {
		var name string
		if n.kind == '{' {
			token, err := d.Token()
			if name, _ = token.(string); err != nil || !unicodeOnly(name) {
				return false
			}
		}
		child, ok := parseValue(d, depth)
		if !ok {
			return false
		}
		child.name = name
		n.children = append(n.children, child)
	}
	if _, err := d.Token(); err != nil {
		return false
	}
	if n.kind == '[' {
		return true
	}
	slices.SortFunc(n.children, func(a, b node) int { return cmp.Compare(a.name, b.name) })
	for i := 1; i < len(n.children); i++ {
		if n.children[i].name == n.children[i-1].name {
			return false
		}
	}
	return true
}

// unicodeOnly: the decoder writes U+FFFD for half a surrogate pair, so that two
// different texts would be the same.
func unicodeOnly(s string) bool { return !strings.ContainsRune(s, utf8.RuneError) }

func (s *summer) node(n *node) {
	s.number(int(n.kind))
	s.text(n.text)
	s.number(len(n.children))
	for i := range n.children {
		if n.kind == '{' {
			s.text(n.children[i].name)
		}
		s.node(&n.children[i])
	}
}
