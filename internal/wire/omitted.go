package wire

import (
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/internal/ids"
)

// JSON is the content type of a message that comes without one.
const JSON = "application/json"

// stampUnit is the precision of a time stamp on RabbitMQ.
const stampUnit = time.Second

// TimeInID reports whether the id tells when a message was written as well as a time stamp would.
func TimeInID(id uuid.UUID, at time.Time) bool { return ids.Time(id).Sub(at).Abs() < stampUnit }

// PublishedAt is when a message was written: its time stamp, else the time of a CloudEvent, else the time
// in the id. It is zero where there is none of them.
func PublishedAt(stamp time.Time, headers map[string]string, id uuid.UUID) time.Time {
	if !stamp.IsZero() {
		return stamp
	}
	if at := eventTime(headers); !at.IsZero() {
		return at
	}
	if ids.Check(id) != nil {
		return time.Time{}
	}
	return ids.Time(id)
}
