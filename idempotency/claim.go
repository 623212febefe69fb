package idempotency

import (
	"context"

	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/idempotency/internal/keys"
)

// MarkEffect says that the work under ctx has had, or may have had, an effect
// that nobody takes back: call it before a payment is sent. From then on the key
// is never free again: a response that would not be kept is kept, and after an
// error, a panic or a response that cannot be kept there is a tombstone. Without
// a claim in ctx it does nothing.
//
// The mark is in memory only. If the process dies, the lease runs out and the
// key runs again: give the effect a key of its own, see ChildKey.
func MarkEffect(ctx context.Context) {
	if claim, ok := driver.ClaimFrom(ctx); ok {
		claim.MarkEffect()
	}
}

// ChildKey returns the key for a part of the work under ctx, such as a call to
// a payment provider: always the same one for the same name below the same key,
// whichever run asks for it, and nothing that could be known without the key.
// Without a claim in ctx it is ErrNoClaim.
func ChildKey(ctx context.Context, name string) (Key, error) {
	claim, ok := driver.ClaimFrom(ctx)
	if !ok {
		return "", ErrNoClaim
	}
	return Key(keys.Child(string(claim.Key), name)), nil
}
