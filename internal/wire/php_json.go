package wire

import (
	"bytes"
	"encoding/json"
	"strconv"
	"strings"
	"unicode/utf8"
)

// quote writes a text in pieces, since each byte may become six.
func (p *php) quote(text string) error {
	if p.planning {
		return nil
	}
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
	if p.planning || p.full() {
		return nil
	}
	if len(p.out)+len(text) > maxBody {
		return errPHP
	}
	p.out = append(p.out, text...)
	return nil
}

// decide notes a decision of the first pass, to be changed until its end, and returns its number.
func (p *php) decide(yes bool) int {
	p.plan = append(p.plan, yes)
	return len(p.plan) - 1
}

// decided returns the next decision of the first pass.
func (p *php) decided() bool {
	yes := p.plan[0]
	p.plan = p.plan[1:]
	return yes
}

// members reads the properties of an object up to the closing brace. Classes above may have private ones
// of the same name: the object's own wins. Where only classes above have the name, the message is refused.
func (p *php) members(class string, n int) error {
	if class != "stdClass" && n > maxProperties {
		return errPHP
	}
	if err := p.write("{"); err != nil {
		return err
	}
	own := &members{class: class, seen: map[string]member{}}
	written := 0
	for range n {
		name, err := p.key()
		if err != nil {
			return err
		}
		left := false            // out of the JSON
		if class != "stdClass" { // whose properties are all its own, and may be many
			if p.planning {
				name, err = own.add(p, name)
			} else {
				name, left = name[strings.LastIndexByte(name, 0)+1:], p.decided()
			}
		}
		start := len(p.out)
		if err != nil || p.comma(written) != nil || p.quote(name) != nil || p.write(":") != nil || p.value() != nil {
			return errPHP
		}
		if left {
			p.out = p.out[:start]
			continue
		}
		written++
	}
	if err := p.write("}"); err != nil {
		return err
	}
	return p.expect("}")
}

// members are the properties of one object in the first pass.
type members struct {
	class string
	seen  map[string]member
}

type member struct {
	decision int  // that it is left out
	hidden   bool // it is private to a class above
}

// add notes a property, and returns its name without what tells who may see it.
func (m *members) add(p *php, name string) (string, error) {
	now := member{decision: p.decide(false)}
	if i := strings.LastIndexByte(name, 0); i >= 0 {
		owner := strings.TrimPrefix(name[:i], "\x00")
		name, now.hidden = name[i+1:], owner != "*" && owner != m.class
	}
	other, twice := m.seen[name]
	switch {
	case twice && other.hidden == now.hidden:
		return "", errPHP
	case twice && now.hidden:
		p.plan[now.decision] = true
		return name, nil
	case twice:
		p.plan[other.decision] = true
	}
	m.seen[name] = now
	return name, nil
}

// array reads a list, whose keys count from 0, or a map. The first pass finds out which of them.
func (p *php) array() error {
	n, err := p.open()
	if err != nil {
		return err
	}
	isList := true
	decision := 0
	if p.planning {
		decision = p.decide(true)
	} else {
		isList = p.decided()
	}
	brackets := "{}"
	if isList {
		brackets = "[]"
	}
	if err := p.write(brackets[:1]); err != nil {
		return err
	}
	for i := range n {
		counts := bytes.HasPrefix(p.in, []byte("i:"+strconv.Itoa(i)+";"))
		if p.planning && !counts {
			p.plan[decision] = false
		}
		name, err := p.key()
		if err != nil || p.comma(i) != nil {
			return errPHP
		}
		if !isList && (p.quote(name) != nil || p.write(":") != nil) {
			return errPHP
		}
		if err := p.value(); err != nil {
			return err
		}
	}
	if err := p.write(brackets[1:]); err != nil {
		return err
	}
	return p.expect("}")
}
