package wire

import (
	"fmt"

	"github.com/holdfast-go/holdfast/outbox/format"
)

// Form is what goes by a format.
type Form struct {
	Symfony *Symfony
	Events  *Events // nil: messages are not sent as events
}

// Own reports whether messages have this module's own form, for which readers know what is left out.
func (f Form) Own() bool { return f.Events == nil && !f.Symfony.On() }

// NewForm returns what goes by a format, or every violation in it.
func NewForm(f format.Format) (Form, error) {
	plain := &Symfony{}
	switch f := f.(type) {
	case nil:
		return Form{Symfony: plain}, nil
	case format.Symfony:
		s, err := NewSymfony(f)
		return Form{Symfony: s}, err
	case format.CloudEvents:
		e, err := newEvents(f)
		return Form{Symfony: plain, Events: e}, err
	}
	return Form{Symfony: plain}, fmt.Errorf("%T is none of this module", f)
}
