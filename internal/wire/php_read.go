package wire

import (
	"bytes"
	"strconv"
	"strings"
	"unicode/utf8"
)

// object reads the beginning of an object, as far as its properties.
func (p *php) object() (class string, n int, err error) {
	if class, err = p.quoted("O:"); err != nil {
		return "", 0, err
	}
	if err = p.expect(":"); err != nil {
		return "", 0, err
	}
	if n, err = p.count(); err != nil {
		return "", 0, err
	}
	return class, n, p.expect(":{")
}

// property reads a name without what tells who may see it.
func (p *php) property() (string, error) {
	name, err := p.key()
	return name[strings.LastIndexByte(name, 0)+1:], err
}

// key reads a number or a text.
func (p *php) key() (string, error) {
	if bytes.HasPrefix(p.in, []byte("i:")) {
		return p.scalar("i:")
	}
	name, err := p.text()
	if err != nil {
		return "", err
	}
	return name, p.expect(";")
}

func (p *php) text() (string, error) { return p.quoted("s:") }

// quoted reads a length and so many bytes in quotation marks.
func (p *php) quoted(kind string) (string, error) {
	if err := p.expect(kind); err != nil {
		return "", err
	}
	n, err := p.count()
	if err != nil {
		return "", err
	}
	if err := p.expect(`:"`); err != nil {
		return "", err
	}
	if n > len(p.in) || !p.stamps && !utf8.Valid(p.in[:n]) {
		return "", errPHP
	}
	text := strings.ToValidUTF8(string(p.in[:n]), "\uFFFD")
	p.in = p.in[n:]
	return text, p.expect(`"`)
}

// count reads a length, which is never more than what is left.
func (p *php) count() (int, error) {
	digits := 0
	for digits < min(len(p.in), 20) && p.in[digits] >= '0' && p.in[digits] <= '9' {
		digits++
	}
	n, err := strconv.Atoi(string(p.in[:digits]))
	if err != nil || n > len(p.in) {
		return 0, errPHP
	}
	p.in = p.in[digits:]
	return n, nil
}

// scalar reads what is between a kind and the semicolon.
func (p *php) scalar(kind string) (string, error) {
	if err := p.expect(kind); err != nil {
		return "", err
	}
	end := bytes.IndexByte(p.in[:min(len(p.in), 64)], ';')
	if end < 1 {
		return "", errPHP
	}
	text := string(p.in[:end])
	p.in = p.in[end+1:]
	return text, nil
}

func (p *php) expect(text string) error {
	if !bytes.HasPrefix(p.in, []byte(text)) {
		return errPHP
	}
	p.in = p.in[len(text):]
	return nil
}

// open reads the beginning of an array, as far as its keys.
func (p *php) open() (n int, err error) {
	if err = p.expect("a:"); err != nil {
		return 0, err
	}
	if n, err = p.count(); err != nil {
		return 0, err
	}
	return n, p.expect(":{")
}
