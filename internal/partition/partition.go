// Package partition maps keys to the partitions of a stream. Senders and consumers use the same
// mapping, also in other languages.
package partition

import (
	"fmt"
	"hash/crc32"
	"strconv"
)

// Max is the maximum number of partitions of a stream.
const Max = 64

// Of returns the partition of a message, from 0 to n-1: CRC-32 (IEEE, as in zlib) of the bytes of its
// key modulo n. A message without a key uses its id. For n below 2 the result is 0.
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

// Names returns the names of all n partitions. For n below 2 it returns the stream's own name.
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

// Check returns an error if n is not a valid number of partitions.
func Check(n int) error {
	if n < 0 || n > Max {
		return fmt.Errorf("%d is not from 0 to %d", n, Max)
	}
	return nil
}
