package wire

import (
	"fmt"

	"github.com/holdfast-go/holdfast/format"
	"github.com/holdfast-go/holdfast/symfony"
)

// NewForm returns what goes by a format, or every violation in it.
func NewForm(f format.Format) (*Symfony, error) {
	switch f := f.(type) {
	case nil:
		return NewSymfony(symfony.Format{})
	case symfony.Format:
		return NewSymfony(f)
	}
	none, _ := NewSymfony(symfony.Format{}) // nothing in it can be wrong
	return none, fmt.Errorf("%T is none of this module", f)
}
