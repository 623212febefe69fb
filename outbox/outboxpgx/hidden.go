package outboxpgx

import (
	"context"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/check"
	"github.com/holdfast-go/holdfast/internal/pgcheck"
)

// hidden is what row-level security hides from the relay's role. A relay that sees no rows has nothing to do, like one whose
// outbox is empty, so a claim that finds nothing looks for it now and then.
type hidden struct {
	mu     sync.Mutex
	looked time.Time
	found  error
}

// lookHidden is the time between two looks.
const lookHidden = 30 * time.Second

func (h *hidden) due() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if !h.looked.IsZero() && time.Since(h.looked) < lookHidden {
		return false
	}
	h.looked = time.Now()
	return true
}

func (h *hidden) set(found error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.found = found
}

func (h *hidden) err() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.found
}

// checkHidden looks for row-level security of the tables that a claim reads.
func (s *Store) checkHidden(ctx context.Context) error {
	if !s.hidden.due() {
		return nil
	}
	found := check.Findings{Component: "outboxpgx"}
	err := s.use(ctx, func(ctx context.Context, conn *pgxpool.Conn) error {
		return pgcheck.Hidden(ctx, conn, &found, s.t.outbox, s.t.lanes)
	})
	if err == nil {
		s.hidden.set(found.Err())
	}
	return err
}
