package inboxredis

import "testing"

// Groups of streams whose names look alike share no keys.
func TestKeysOfNoTwoGroups(t *testing.T) {
	t.Parallel()
	owners := map[string][2]string{}
	for _, stream := range []string{"orders", "{orders}", "orders:a", "{orders}:a", "{orders}:", "{orders}a", "o{rders}"} {
		for _, group := range []string{"g", "a:g", ":g", "a", "a%3Ag", "a:b:g", "orders:g"} {
			k, err := newKeys(stream, group)
			if err != nil {
				t.Fatal(err)
			}
			if other, taken := owners[k.later()]; taken {
				t.Errorf("%s of %s and %s of %s share %s", group, stream, other[1], other[0], k.later())
			}
			owners[k.later()] = [2]string{stream, group}
		}
	}
}
