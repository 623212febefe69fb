package sum

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"slices"
	"strconv"
	"strings"
	"unicode/utf16"
	"unicode/utf8"
)

const (
	// maxDepth bounds the recursion over a document.
	maxDepth = 1000
	// textEnd ends a text in the canonical form: no UTF-8 has this byte.
	textEnd = 0xff
)

// canonicalJSON returns the form that a JSON document shares with every other spelling of it:
// white space, the order of members and escapes do not count. A number counts as it is written,
// because 1 and 1.0 may be different amounts to somebody.
//
// It returns false for what counts as raw bytes: what is no JSON document, what two readers may
// understand differently (a name that is there twice, half a surrogate pair), and what is nested
// deeper than maxDepth.
//
// Time and memory are proportional to the body: it is the client who chooses the document.
func canonicalJSON(body []byte) ([]byte, bool) {
	if !utf8.Valid(body) || !json.Valid(body) {
		return nil, false
	}
	c := canonizer{rest: body, out: make([]byte, 0, len(body))}
	ok := c.value(maxDepth)
	return c.out, ok
}

// canonizer walks over a document that is valid.
type canonizer struct {
	rest []byte
	out  []byte
}

func (c *canonizer) value(depth int) bool {
	if depth == 0 {
		return false
	}
	switch c.peek() {
	case '{':
		return c.object(depth)
	case '[':
		return c.array(depth)
	case '"':
		text, ok := c.text()
		c.write('"', text)
		return ok
	}
	end := bytes.IndexAny(c.rest, ",]} \t\r\n")
	if end < 0 {
		end = len(c.rest)
	}
	c.write('0', c.rest[:end]) // a number, true, false or null
	c.rest = c.rest[end:]
	return true
}

func (c *canonizer) array(depth int) bool {
	c.out = append(c.out, '[')
	c.skip()
	for c.peek() != ']' {
		if c.rest[0] == ',' {
			c.skip()
		}
		if !c.value(depth - 1) {
			return false
		}
	}
	c.skip()
	c.out = append(c.out, ']')
	return true
}

// member is one of an object. The sum stands for the value, so that sorting moves no values.
type member struct {
	name []byte
	sum  [sumSize]byte
}

const sumSize = 16 // 128 bits of a SHA-256

func (c *canonizer) object(depth int) bool {
	var members []member
	c.skip()
	for c.peek() != '}' {
		if c.rest[0] == ',' {
			c.skip()
			c.peek()
		}
		name, ok := c.text()
		c.peek()
		c.skip() // the colon
		start := len(c.out)
		if !ok || !c.value(depth-1) {
			return false
		}
		sum := sha256.Sum256(c.out[start:])
		members = append(members, member{name, [sumSize]byte(sum[:])})
		c.out = c.out[:start]
	}
	c.skip()
	return c.writeMembers(members)
}

// writeMembers returns false if a name is there twice.
func (c *canonizer) writeMembers(members []member) bool {
	slices.SortFunc(members, func(a, b member) int { return bytes.Compare(a.name, b.name) })
	c.out = append(c.out, '{')
	for i := range members {
		if i > 0 && bytes.Equal(members[i].name, members[i-1].name) {
			return false
		}
		c.write('"', members[i].name)
		c.out = append(c.out, members[i].sum[:]...)
	}
	c.out = append(c.out, '}')
	return true
}

func (c *canonizer) write(kind byte, text []byte) {
	c.out = append(c.out, kind)
	c.out = append(c.out, text...)
	c.out = append(c.out, textEnd)
}

// peek returns the next byte that is no white space.
func (c *canonizer) peek() byte {
	for strings.IndexByte(" \t\r\n", c.rest[0]) >= 0 {
		c.rest = c.rest[1:]
	}
	return c.rest[0]
}

func (c *canonizer) skip() { c.rest = c.rest[1:] }

// text returns what the string at hand stands for, and false for half a surrogate pair.
func (c *canonizer) text() (text []byte, ok bool) {
	c.skip()
	end := bytes.IndexAny(c.rest, `"\`)
	if c.rest[end] == '"' {
		text, c.rest = c.rest[:end], c.rest[end+1:]
		return text, true
	}
	for ok = true; c.rest[0] != '"'; {
		if c.rest[0] != '\\' {
			text = append(text, c.rest[0])
			c.skip()
			continue
		}
		r := c.escape()
		if utf16.IsSurrogate(r) {
			r = utf16.DecodeRune(r, c.escape())
			ok = ok && r != utf8.RuneError
		}
		text = utf8.AppendRune(text, r)
	}
	c.skip()
	return text, ok
}

// escape returns the rune of the escape at hand, and RuneError if there is none.
func (c *canonizer) escape() rune {
	if c.rest[0] != '\\' {
		return utf8.RuneError
	}
	kind := c.rest[1]
	if i := strings.IndexByte(`"\/bfnrt`, kind); i >= 0 {
		c.rest = c.rest[2:]
		return rune("\"\\/\b\f\n\r\t"[i])
	}
	n, _ := strconv.ParseUint(string(c.rest[2:6]), 16, 16) // the document is valid
	c.rest = c.rest[6:]
	return rune(n)
}
