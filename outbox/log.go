package outbox

import (
	"context"
	"log/slog"

	"github.com/holdfast-go/holdfast/internal/telemetry"
)

// journal writes what happens again and again: of each kind one line in 10 s, which says how many were
// left out before it. Messages that fail come in streams, and the hooks and metrics tell of each.
type journal func(ctx context.Context, level slog.Level, msg, kind string, attrs ...slog.Attr)

func newJournal(logger *slog.Logger) journal {
	var seldom telemetry.SeldomEach
	return func(ctx context.Context, level slog.Level, msg, kind string, attrs ...slog.Attr) {
		if repeats, ok := seldom.Due(msg + " " + kind); ok {
			logger.LogAttrs(ctx, level, msg, append(attrs, slog.Int("repeats", repeats))...)
		}
	}
}
