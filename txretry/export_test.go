package txretry

import "time"

// SetWaits sets how long the manager waits for a connection and for the answer to BEGIN.
func (m *Manager) SetWaits(acquire, begin time.Duration) {
	m.bounds.acquire, m.bounds.begin = acquire, begin
}

// Waiting returns how many calls stand in line for a serial key.
func (m *Manager) Waiting(key string) int {
	m.turns.mu.Lock()
	defer m.turns.mu.Unlock()
	return len(m.turns.lines[key])
}
