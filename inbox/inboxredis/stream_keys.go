package inboxredis

import (
	"errors"
	"strconv"
	"strings"

	"github.com/holdfast-go/holdfast/inbox/driver"
)

// maxNameBytes bounds the names of streams, groups and consumers.
const maxNameBytes = 512

// keys are all that a consumer uses, in one slot of a Cluster.
type keys struct {
	stream string
	own    string // begins the others
}

// noColons escapes what stands between the parts of a key.
var noColons = strings.NewReplacer("%", "%25", ":", "%3A")

// newKeys names the keys of a group. A hash tag of the stream is theirs, too; without one the
// stream's whole name is. No two groups share a key: the names of groups have no colons there, and
// two of them follow a stream with a tag of its own.
func newKeys(stream, group string) (keys, error) {
	switch open := strings.IndexByte(stream, '{'); {
	case stream == "" || len(stream) > maxNameBytes:
		return keys{}, errors.New("the stream's name is empty or longer than 512 bytes")
	case group == "" || len(group) > maxNameBytes:
		return keys{}, errors.New("the group's name is empty or longer than 512 bytes")
	case !strings.ContainsAny(stream, "{}"):
		return keys{stream, "{" + stream + "}:" + noColons.Replace(group) + ":"}, nil
	case open < 0 || strings.IndexByte(stream[open:], '}') < 2:
		return keys{}, errors.New("the stream's name has a brace, but no hash tag such as {orders}")
	default:
		return keys{stream, stream + "::" + noColons.Replace(group) + ":"}, nil
	}
}

// retries is the stream of those that are due.
func (k keys) retries() string { return k.own + "retries" }

// later are the retries that wait, by the time when they are due.
func (k keys) later() string { return k.own + "later" }

// putOff are the messages that wait and have not failed, by the time when they are due.
func (k keys) putOff() string { return k.own + "putoff" }

// waiting is where a message waits.
func (k keys) waiting(putOff bool) string {
	if putOff {
		return k.putOff()
	}
	return k.later()
}

// owner is the lease of ordered consumers.
func (k keys) owner() string { return k.own + "owner" }

// probe is written to find out whether writes are taken.
func (k keys) probe() string { return k.own + "probe" }

// processes are those that share so many partitions, by when they were heard of; of the first partition.
func (k keys) processes(partitions int) string {
	return k.own + "processes." + strconv.Itoa(partitions)
}

// dead is the stream of the dead letters of a class.
func (k keys) dead(prefix, class string) string { return k.own + driver.DeadLetterQueue(prefix, class) }

// read are the streams that are read, and the lease: what most scripts name.
func (k keys) read() []string { return []string{k.stream, k.retries(), k.owner()} }

// index is 1 for the stream of the retries.
func (k keys) index(stream string) int {
	if stream == k.stream {
		return 0
	}
	return 1
}
