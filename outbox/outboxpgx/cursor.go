package outboxpgx

import (
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgtype"
)

// cursor is the place of a row in a list: the time by which the list is sorted first, and seq. As a text it is
// "microseconds.seq", infinite times by their names.
type cursor struct {
	at  pgtype.Timestamptz
	seq int64
}

// start is before every row.
var start = cursor{pgtype.Timestamptz{InfinityModifier: pgtype.NegativeInfinity, Valid: true}, math.MinInt64}

func (c cursor) String() string {
	at := c.at.InfinityModifier.String()
	if c.at.InfinityModifier == pgtype.Finite {
		at = strconv.FormatInt(c.at.Time.UnixMicro(), 10)
	}
	return at + "." + strconv.FormatInt(c.seq, 10)
}

// parseCursor reads a cursor; "" is the start.
func parseCursor(text string) (cursor, error) {
	if text == "" {
		return start, nil
	}
	at, seq, _ := strings.Cut(text, ".")
	c := cursor{at: pgtype.Timestamptz{Valid: true}}
	var err1, err2 error
	switch at {
	case pgtype.Infinity.String():
		c.at.InfinityModifier = pgtype.Infinity
	case pgtype.NegativeInfinity.String():
		c.at.InfinityModifier = pgtype.NegativeInfinity
	default:
		var micro int64
		micro, err1 = strconv.ParseInt(at, 10, 64)
		c.at.Time = time.UnixMicro(micro)
	}
	c.seq, err2 = strconv.ParseInt(seq, 10, 64)
	if err1 != nil || err2 != nil {
		return c, fmt.Errorf("outboxpgx: %.80q is no cursor of a list", text)
	}
	return c, nil
}
