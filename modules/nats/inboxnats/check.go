package inboxnats

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/internal/check"
)

// Check checks that the streams and durable consumers exist with the settings of Setup, that the stream takes
// Stream.Subject and does not drop unprocessed messages, that the connection reconnects forever, and that the times in the Config fit together. Then
// it calls the processor's Check, if it has one.
//
// It returns nil if it finds nothing. Otherwise the error joins the findings, each with a method Fix() string, and
// the errors of checks that failed.
func (c *Consumer) Check(ctx context.Context) error {
	found := check.Findings{Component: component}
	if n := c.cfg.conn.Opts.MaxReconnect; n >= 0 {
		found.Add("set nats.MaxReconnects(-1)", "the connection gives up after %d attempts to reconnect", n)
	}
	c.cfg.memory.Check(c.cfg.ConsumerConfig, &found)
	found.Join(c.checkServer(ctx, &found))
	if p, ok := c.processor.(interface{ Check(context.Context) error }); ok {
		found.Join(p.Check(ctx))
	}
	return found.Err()
}

// checkServer checks the server, until it does not answer.
func (c *Consumer) checkServer(ctx context.Context, found *check.Findings) error {
	for i, want := range c.cfg.streams() {
		info, err := c.parts[0].stat(ctx, want.Name)
		if errors.Is(err, driver.ErrMissing) {
			found.Add("call Consumer.Setup", "stream %q does not exist", want.Name)
			continue
		}
		if err != nil {
			return fmt.Errorf("inboxnats: check: %w", err)
		}
		checkStream(i == 0, info.Config, want, found)
		if i == 0 {
			c.cfg.checkSubjects(info.Config, found)
		}
	}
	for _, s := range c.parts {
		for _, stream := range []string{s.stream, s.retries} {
			info, err := s.info(ctx, stream)
			if errors.Is(err, driver.ErrMissing) {
				found.Add("call Consumer.Setup", "stream %q has no consumer %q", stream, s.consumer)
				continue
			}
			if err != nil {
				return fmt.Errorf("inboxnats: check: %w", err)
			}
			s.checkConsumer(stream, info.Config, found)
		}
	}
	return nil
}

// checkStream compares a stream with the one that Setup creates. The first one may belong to somebody else.
func checkStream(first bool, is, want jetstream.StreamConfig, found *check.Findings) {
	if is.Storage != jetstream.FileStorage {
		found.Add("create it with storage file", "stream %q loses its messages when the server ends", is.Name)
	}
	bounded := is.MaxMsgs > 0 || is.MaxBytes > 0 || is.MaxAge > 0 || is.MaxMsgsPerSubject > 0
	switch {
	case first && is.Retention == jetstream.LimitsPolicy && !bounded:
		found.Add("set max_age, or create it with retention interest", "stream %q keeps processed messages for ever", is.Name)
	case first && is.Discard == jetstream.DiscardOld && (is.MaxMsgs > 0 || is.MaxBytes > 0):
		found.Add("set discard to new, or remove max_msgs and max_bytes", "stream %q drops the oldest messages, processed or not", is.Name)
	case !first && (is.Retention != want.Retention || is.MaxAge != want.MaxAge || is.MaxMsgsPerSubject > want.MaxMsgsPerSubject || is.MaxMsgs > 0):
		found.Add("delete it when it is empty, and call Consumer.Setup", "stream %q has other limits than Setup gives it", is.Name)
	}
}

// checkSubjects compares the subjects of the stream with the filters of its consumers. A stream that takes only a part of
// a filter is in order. A stream with sources or a mirror also has other subjects.
func (s *settings) checkSubjects(is jetstream.StreamConfig, found *check.Findings) {
	if is.Mirror != nil || len(is.Sources) > 0 || is.SubjectTransform != nil {
		return
	}
	if slices.Equal(is.Subjects, s.notYet()) {
		found.Add("call Consumer.Setup", "stream %q has no subjects yet: a Setup runs or was interrupted", is.Name)
		return
	}
	for _, p := range s.places {
		if !slices.ContainsFunc(is.Subjects, func(subject string) bool { return overlap(subject, p.filter) }) {
			found.Add(fmt.Sprintf("add subject %q to stream %q", p.filter, is.Name), "stream %q takes no message of subject %q", is.Name, p.filter)
		}
	}
}

// overlap reports whether a subject matches both patterns.
func overlap(a, b string) bool {
	as, bs := strings.Split(a, "."), strings.Split(b, ".")
	for i := range min(len(as), len(bs)) {
		if as[i] == ">" || bs[i] == ">" {
			return true
		}
		if as[i] != bs[i] && as[i] != "*" && bs[i] != "*" {
			return false
		}
	}
	return len(as) == len(bs)
}

// checkConsumer compares a durable consumer with the one that Setup creates.
func (s *source) checkConsumer(stream string, is jetstream.ConsumerConfig, found *check.Findings) {
	add := func(fix, format string, args ...any) {
		found.Add(fix, "consumer %q of stream %q "+format, append([]any{s.consumer, stream}, args...)...)
	}
	if is.AckPolicy != jetstream.AckExplicitPolicy {
		add("delete it, and call Consumer.Setup", "has ack policy %s, not explicit", is.AckPolicy)
	}
	if is.DeliverSubject != "" {
		add("delete it, and call Consumer.Setup", "pushes")
	}
	if len(is.BackOff) > 0 {
		add("remove backoff: retries have their delays from ConsumerConfig.Retry", "has a backoff, whose first step %v replaces ack_wait %v", is.BackOff[0], is.AckWait)
	}
	if renewal := ackWait / renewals; is.AckWait < 2*renewal && len(is.BackOff) == 0 {
		add("set ack_wait to "+ackWait.String(), "has ack_wait %v, under %v: it redelivers messages before their first renewal", is.AckWait, 2*renewal)
	}
	if is.MaxDeliver > 0 {
		add("set max_deliver to -1", "drops messages after %d deliveries, also those that requeued them", is.MaxDeliver)
	}
	if is.MaxAckPending > 0 && (stream == s.retries || is.MaxAckPending < s.Prefetch) {
		add("set max_ack_pending to -1", "stops at %d unsettled messages of all processes, waiting retries among them", is.MaxAckPending)
	}
	if is.MaxRequestBatch > 0 && is.MaxRequestBatch < s.Prefetch || is.MaxRequestExpires > 0 && is.MaxRequestExpires < pullTime {
		add("remove max_batch and max_expires", "rejects requests for %d messages within %v", s.Prefetch, pullTime)
	}
	if stream == s.stream && is.FilterSubject != s.filter {
		add("delete it when it is empty, and call Consumer.Setup", "has filter subject %q, not %q", is.FilterSubject, s.filter)
	}
}
