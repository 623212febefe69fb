package outbox

import (
	"context"
	"log/slog"
)

// log writes what happens again and again: of each kind one line in 10 s, which says how many were
// left out before it. Messages that fail come in streams, and the hooks and metrics tell of each.
func (r *Relay) log(ctx context.Context, level slog.Level, msg, kind string, attrs ...slog.Attr) {
	repeats, ok := r.seldom.Due(msg + " " + kind)
	if ok {
		r.cfg.Logger.LogAttrs(ctx, level, msg, append(attrs, slog.Int("repeats", repeats))...)
	}
}
