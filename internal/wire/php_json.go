package wire

import (
	"bytes"
	"encoding/json"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"
)

// quote writes a text in pieces, since each byte may become six.
func (p *php) quote(text string) error {
	if err := p.write(`"`); err != nil {
		return err
	}
	for len(text) > 0 {
		n := min(len(text), 64<<10)
		for n < len(text) && !utf8.RuneStart(text[n]) {
			n--
		}
		quoted, _ := json.Marshal(text[:n]) // a string can always be encoded
		if err := p.write(string(quoted[1 : len(quoted)-1])); err != nil {
			return err
		}
		text = text[n:]
	}
	return p.write(`"`)
}

// comma writes one before all but the first.
func (p *php) comma(i int) error {
	if i == 0 {
		return nil
	}
	return p.write(",")
}

// full reports whether stamps are too long for a header, and no more of them is written.
func (p *php) full() bool { return p.stamps && len(p.out) > maxHeader }

func (p *php) write(text string) error {
	if p.full() {
		return nil
	}
	if len(p.out)+len(text) > maxBody {
		return errPHP
	}
	p.out = append(p.out, text...)
	return nil
}

// members writes the properties of an object up to the closing brace. Classes above may have private ones
// of the same name: the object's own wins, and where only those above have it nothing tells whose counts.
func (p *php) members(class string, n int) error {
	if class != "stdClass" && n > maxProperties {
		return errPHP
	}
	open := len(p.out)
	if err := p.write("{"); err != nil {
		return err
	}
	seen := map[string]member{}
	for range n {
		name, err := p.key()
		if err != nil {
			return err
		}
		now := member{start: len(p.out)}
		if i := strings.LastIndexByte(name, 0); i >= 0 {
			owner := strings.TrimPrefix(name[:i], "\x00")
			name, now.hidden = name[i+1:], owner != "*" && owner != class
		}
		other, twice := seen[name]
		if p.write(",") != nil || p.quote(name) != nil || p.write(":") != nil || p.value() != nil || twice && other.hidden == now.hidden {
			return errPHP
		}
		now.end = len(p.out)
		switch {
		case twice && now.hidden:
			p.out = p.out[:now.start]
			continue
		case twice:
			p.out = slices.Delete(p.out, other.start, other.end)
			shift(seen, other)
			now.start, now.end = now.start-(other.end-other.start), len(p.out)
		}
		if class != "stdClass" { // whose properties are all its own, and may be many
			seen[name] = now
		}
	}
	if n > 0 && !p.full() {
		p.out = slices.Delete(p.out, open+1, open+2) // the first comma
	}
	if err := p.write("}"); err != nil {
		return err
	}
	return p.expect("}")
}

// member is a property as it is written, with the comma before it.
type member struct {
	start, end int
	hidden     bool // it is private to a class above
}

// shift moves the members behind one that is deleted.
func shift(seen map[string]member, gone member) {
	for name, m := range seen {
		if m.start >= gone.end {
			m.start, m.end = m.start-(gone.end-gone.start), m.end-(gone.end-gone.start)
			seen[name] = m
		}
	}
}

// list reads values whose keys count from 0. Where that ends it is a map after all.
func (p *php) list(n int) error {
	open := len(p.out)
	var starts []int // of the values
	if err := p.write("["); err != nil {
		return err
	}
	for i := range n {
		if !bytes.HasPrefix(p.in, []byte("i:"+strconv.Itoa(i)+";")) {
			if err := p.giveKeys(open, starts); err != nil {
				return err
			}
			return p.rest(i, n)
		}
		if _, err := p.scalar("i:"); err != nil {
			return err
		}
		if err := p.comma(i); err != nil {
			return err
		}
		starts = append(starts, len(p.out))
		if err := p.value(); err != nil {
			return err
		}
	}
	if err := p.write("]"); err != nil {
		return err
	}
	return p.expect("}")
}

// giveKeys makes the beginning of a map of that of a list, in place and from its end, since a copy at each
// level of nesting would be many times the body.
func (p *php) giveKeys(open int, starts []int) error {
	if p.full() {
		return nil
	}
	room, end := 0, len(p.out)
	for i := range starts {
		room += len(listKey(i))
	}
	if end+room > maxBody {
		return errPHP
	}
	p.out = append(p.out, make([]byte, room)...)
	for i := len(starts) - 1; i >= 0; i-- {
		copy(p.out[starts[i]+room:], p.out[starts[i]:end])
		key := listKey(i)
		room -= len(key)
		copy(p.out[starts[i]+room:], key)
		end = starts[i] - 1 // before the comma, or the bracket
		p.out[end+room] = ','
	}
	p.out[open] = '{'
	return nil
}

func listKey(i int) string { return `"` + strconv.Itoa(i) + `":` }

// properties reads names with values up to the closing brace.
func (p *php) properties(n int) error {
	if err := p.write("{"); err != nil {
		return err
	}
	return p.rest(0, n)
}

// rest reads the properties from the i-th on.
func (p *php) rest(i, n int) error {
	for ; i < n; i++ {
		name, err := p.key()
		if err != nil {
			return err
		}
		if p.comma(i) != nil || p.quote(name) != nil || p.write(":") != nil || p.value() != nil {
			return errPHP
		}
	}
	if err := p.write("}"); err != nil {
		return err
	}
	return p.expect("}")
}
