package txretry

import "time"

// SetWaits sets how long the manager waits for a connection and for the answer to BEGIN.
func (m *Manager) SetWaits(acquire, begin time.Duration) {
	m.bounds.acquire, m.bounds.begin = acquire, begin
}
