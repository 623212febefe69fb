package idempotency_test

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/idempotencytest"
)

// draftUUID and draftRandom are the examples of the draft.
const (
	draftUUID   = `"8e03978e-40d5-43e8-bc93-6894a57f9324"`
	draftRandom = `"clkyoesmbgybucifusbbtdsbohtyuuwz"`
	draftDocs   = "https://developer.example.com/idempotency"
)

// draftTests are the rules of draft-ietf-httpapi-idempotency-key-header for a resource. The guide explains the rule
// beside each of these names.
var draftTests = map[string]func(t *testing.T, s *draftServer){
	"2.1 a String": func(t *testing.T, s *draftServer) {
		for _, key := range []string{draftUUID, draftRandom} {
			s.wants(s.post(key, "pay 1"), 201, "")
		}
		for _, key := range []string{`"a`, `"a";b=1`, `"a", "b"`, `"a\b"`} {
			s.wants(s.post(key, "pay 1"), 400, "IDEMPOTENCY_KEY_INVALID")
		}
	},
	"2.2 not reused with another payload": func(t *testing.T, s *draftServer) {
		s.wants(s.post(draftUUID, "pay 1"), 201, "")
		s.wants(s.post(draftUUID, "pay 2"), 422, "IDEMPOTENCY_KEY_REUSED")
	},
	"2.2 a UUID is recommended": func(t *testing.T, s *draftServer) {
		for _, parse := range []func(string) (idempotency.Key, error){idempotency.ParseKey, idempotency.ParseUUID, idempotency.ParseOpaque} {
			if key := idempotency.NewKey(); key == idempotency.NewKey() {
				t.Error("NewKey repeats a key")
			} else if parsed, err := parse(string(key)); parsed != key || err != nil {
				t.Errorf("a new key %q is parsed as %q, %v", key, parsed, err)
			}
		}
	},
	"2.3 expiry": func(t *testing.T, s *draftServer) {
		s.wants(s.post(draftUUID, "pay 1"), 201, "")
		time.Sleep(48*time.Hour - time.Second)
		s.wants(s.post(draftUUID, "pay 1"), 201, "")
		if s.runs != 1 {
			t.Errorf("%d runs before the expiry", s.runs)
		}
		time.Sleep(time.Second)
		s.wants(s.post(draftUUID, "pay 1"), 201, "")
		if s.runs != 2 {
			t.Errorf("%d runs after the expiry", s.runs)
		}
	},
	"2.4 fingerprint of the payload": func(t *testing.T, s *draftServer) {
		s.wants(s.post(draftUUID, `{"cents": 1}`), 201, "")
		s.wants(s.post(draftUUID, `{"cents": 1}`), 201, "")
		s.wants(s.post(draftUUID, `{"cents": 2}`), 422, "IDEMPOTENCY_KEY_REUSED")
	},
	"2.6 first request": func(t *testing.T, s *draftServer) {
		rec := s.post(draftUUID, "pay 1")
		if s.wants(rec, 201, ""); rec.Header().Get(idempotency.ReplayedHeader) != "" || rec.Body.String() != "payment 1" {
			t.Errorf("%v %s", rec.Header(), rec.Body)
		}
	},
	"2.6 retry after success": func(t *testing.T, s *draftServer) {
		first, again := s.post(draftUUID, "pay 1"), s.post(draftUUID, "pay 1")
		if again.Code != first.Code || again.Body.String() != first.Body.String() || s.runs != 1 {
			t.Errorf("%d %s, then %d %s, %d runs", first.Code, first.Body, again.Code, again.Body, s.runs)
		}
	},
	"2.6 retry after an error": func(t *testing.T, s *draftServer) {
		first, again := s.post(draftUUID, "refuse"), s.post(draftUUID, "refuse")
		if s.wants(again, 409, ""); again.Body.String() != first.Body.String() || s.runs != 1 {
			t.Errorf("%s, then %s, %d runs", first.Body, again.Body, s.runs)
		}
	},
	"2.6 concurrent request": func(t *testing.T, s *draftServer) {
		s.blocked = make(chan struct{})
		done := make(chan struct{})
		go func() { defer close(done); s.wants(s.post(draftUUID, "pay 1"), 201, "") }()
		synctest.Wait()
		s.wants(s.post(draftUUID, "pay 1"), 409, "IDEMPOTENCY_KEY_IN_USE")
		close(s.blocked)
		<-done
	},
	"2.7 missing key": func(t *testing.T, s *draftServer) {
		s.wants(s.post("", "pay 1"), 400, "IDEMPOTENCY_KEY_REQUIRED")
	},
	"2.7 an error stays one": func(t *testing.T, s *draftServer) {
		s.wants(s.post(draftUUID, "pay 1"), 201, "")
		for range 2 {
			s.wants(s.post(draftUUID, "pay 2"), 422, "IDEMPOTENCY_KEY_REUSED")
			s.wants(s.post("", "pay 1"), 400, "IDEMPOTENCY_KEY_REQUIRED")
		}
	},
	"5 a fixed format": func(t *testing.T, s *draftServer) {
		h := s.protect(idempotency.MiddlewareConfig{})
		for _, key := range []string{draftUUID, draftRandom, "'; DROP TABLE payments; --"} {
			s.wants(s.send(h, "ann", key, "pay 1"), 400, "IDEMPOTENCY_KEY_INVALID")
		}
		if s.runs != 0 {
			t.Error("a malformed key reached the handler")
		}
	},
	"5 a composite key": func(t *testing.T, s *draftServer) {
		ann, bob := s.send(s.handler, "ann", draftRandom, "pay 1"), s.send(s.handler, "bob", draftRandom, "pay 1")
		if ann.Body.String() != "payment 1" || bob.Body.String() != "payment 2" {
			t.Errorf("ann got %s, bob %s", ann.Body, bob.Body)
		}
	},
}

func TestDraft(t *testing.T) {
	t.Parallel()
	for name, test := range draftTests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				s := &draftServer{t: t}
				s.handler = s.protect(idempotency.MiddlewareConfig{ParseKey: idempotency.ParseOpaque, Documentation: draftDocs})
				test(t, s)
			})
		})
	}
}

// The guide's table has exactly one row for each of the tests.
func TestDraftInGuide(t *testing.T) {
	t.Parallel()
	guide, err := os.ReadFile("../examples/guides/idempotency-key.md")
	must(t, err)
	var rows []string
	for _, row := range regexp.MustCompile("`TestDraft/([^`]+)`").FindAllStringSubmatch(string(guide), -1) {
		rows = append(rows, row[1])
	}
	slices.Sort(rows)
	if want := slices.Sorted(maps.Keys(draftTests)); !slices.Equal(slices.Compact(rows), want) {
		t.Errorf("the guide names %q, the tests are %q", rows, want)
	}
}

// draftServer accepts payments.
type draftServer struct {
	t       *testing.T
	handler http.Handler
	runs    int
	blocked chan struct{}
}

func (s *draftServer) protect(cfg idempotency.MiddlewareConfig) http.Handler {
	s.t.Helper()
	user := func(r *http.Request) (string, error) { return r.Header.Get("X-User"), nil }
	protect, err := idempotency.NewMiddleware(idempotencytest.NewStore(), user, cfg)
	if err != nil {
		s.t.Fatal(err)
	}
	return protect(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.runs++
		if s.blocked != nil {
			<-s.blocked
		}
		if body := make([]byte, 6); r.ContentLength == 6 {
			if _, _ = r.Body.Read(body); string(body) == "refuse" {
				http.Error(w, "no funds", http.StatusConflict)
				return
			}
		}
		w.WriteHeader(http.StatusCreated)
		fmt.Fprintf(w, "payment %d", s.runs)
	}))
}

func (s *draftServer) post(key, body string) *httptest.ResponseRecorder {
	return s.send(s.handler, "ann", key, body)
}

func (s *draftServer) send(h http.Handler, user, key, body string) *httptest.ResponseRecorder {
	r := httptest.NewRequest(http.MethodPost, "/payments", strings.NewReader(body))
	r.Header.Set("X-User", user)
	if key != "" {
		r.Header.Set("Idempotency-Key", key)
	}
	return send(h, r)
}

// wants checks the status and, for a problem, its form: the body describes the problem and links to the
// documentation.
func (s *draftServer) wants(rec *httptest.ResponseRecorder, status int, code string) {
	s.t.Helper()
	if rec.Code != status {
		s.t.Errorf("%d %s; want %d %s", rec.Code, rec.Body, status, code)
	}
	if code == "" {
		return
	}
	var p struct{ Type, Title, Detail, Code string }
	err := json.Unmarshal(rec.Body.Bytes(), &p)
	linked := strings.HasPrefix(p.Type, "https://") && strings.HasSuffix(p.Type, "#"+strings.ToLower(code))
	if err != nil || p.Code != code || !linked || p.Title == "" || p.Detail == "" || rec.Header().Get("Content-Type") != "application/problem+json" {
		s.t.Errorf("%v %s, %v; want the code %s and a link", rec.Header(), rec.Body, err, code)
	}
}
