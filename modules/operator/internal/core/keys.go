package core

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"time"
	"unicode/utf8"

	"github.com/holdfast-go/holdfast/idempotency/driver"
)

// looker is a part that tells what it knows of an idempotency key.
type looker interface {
	Look(ctx context.Context, key driver.Key) (driver.Known, error)
}

// KnownKey is what one part knows of a key. The key itself is not told.
type KnownKey struct {
	Part  string    `json:"part"`
	State string    `json:"state"`
	Since time.Time `json:"since,omitzero"`
	// Left is for how many seconds that stands; 0: the part does not tell.
	Left        float64 `json:"left_seconds"`
	Fingerprint string  `json:"fingerprint,omitempty"`
	Status      int     `json:"status,omitempty"` // of HTTP
	Bytes       int     `json:"body_bytes,omitempty"`
	Body        string  `json:"body,omitempty"`
	BodyBase64  string  `json:"body_base64,omitempty"` // of a body that is no text
}

// LookAtKey asks every store of idempotency keys what it knows of a key, with the stored answer where body is true. A store that
// fails does not keep the others from answering.
func (o *Operator) LookAtKey(ctx context.Context, key driver.Key, body bool) ([]KnownKey, error) {
	found := []KnownKey{} // not null in JSON
	var failed []error
	for _, p := range o.Parts() {
		store, ok := p.Part.(looker)
		if !ok {
			continue
		}
		known, err := store.Look(ctx, key)
		if err != nil {
			failed = append(failed, fmt.Errorf("%s: %w", p.Name, err))
			continue
		}
		found = append(found, knownAt(p.Name, known, body))
	}
	return found, errors.Join(failed...)
}

// KeyStates are the words for what a store says.
var KeyStates = map[driver.State]string{0: "free", driver.InProgress: "in flight", driver.Completed: "done"}

func knownAt(part string, known driver.Known, body bool) KnownKey {
	k := KnownKey{
		Part: part, State: KeyStates[known.State], Since: known.Since, Left: known.Left.Seconds(),
		Fingerprint: known.Fingerprint.Sum, Status: known.Response.Status, Bytes: len(known.Response.Body),
	}
	switch {
	case !body:
	case utf8.Valid(known.Response.Body):
		k.Body = string(known.Response.Body)
	default:
		k.BodyBase64 = base64.StdEncoding.EncodeToString(known.Response.Body)
	}
	return k
}
