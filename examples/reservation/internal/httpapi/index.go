package httpapi

import "net/http"

// index is what / answers to all but browsers.
const index = `A ticket shop. It answers:

  GET  /api/events
  POST /api/events                      {"name":"Concert","seats":50}
  GET  /api/events/{id}
  GET  /api/events/{id}/stats
  POST /api/reservations                {"event_id":"...","quantity":2}
  GET  /api/reservations/{id}
  POST /api/reservations/{id}/confirm
  POST /api/reservations/{id}/cancel

A POST needs the headers X-Mock-User-Id, Idempotency-Key and Content-Type: application/json.
Also on this address, or on -ops-addr: /healthz, /readyz, /metrics. A browser may find a page here.
The shop prints commands to try at its start; its README explains them.
`

func showIndex(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	_, _ = w.Write([]byte(index)) // a reader who has left misses nothing
}
