// Package partition splits a stream: senders and consumers go by it, also those in other languages.
package partition

import (
	"fmt"
	"hash/crc32"
	"strconv"
)

// Max is the most partitions that a stream may have.
const Max = 64

// Of returns the partition of a message, from 0 up to n: CRC-32 (IEEE, as in zlib) of the bytes of its
// key, or of id where it has no key, modulo n. Below 2 partitions it is 0.
func Of(key, id string, n int) int {
	if n < 2 {
		return 0
	}
	if key == "" {
		key = id
	}
	return int(crc32.ChecksumIEEE([]byte(key)) % uint32(n))
}

// Name returns the name of a partition of a stream.
func Name(stream string, partition int) string { return stream + "." + strconv.Itoa(partition) }

// Names returns the names of all partitions; below 2 there is one stream, which has its own name.
func Names(stream string, n int) []string {
	if n < 2 {
		return []string{stream}
	}
	names := make([]string, n)
	for i := range names {
		names[i] = Name(stream, i)
	}
	return names
}

// Check returns what is wrong with a number of partitions; nil: nothing.
func Check(n int) error {
	if n < 0 || n > Max {
		return fmt.Errorf("%d is not from 0 to %d", n, Max)
	}
	return nil
}
