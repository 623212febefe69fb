package txretry

import "time"

// Shorten lowers how long the manager waits for a connection and for the answer to BEGIN.
func (m *Manager) Shorten(acquire, begin time.Duration) {
	m.bounds.acquire, m.bounds.begin = acquire, begin
}
