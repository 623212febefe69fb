package pgfault

import (
	"bytes"
	"encoding/binary"

	"github.com/jackc/pgx/v5/pgproto3"
)

// headerBytes are the type of a message and its length.
const headerBytes = 5

// requests reads what a client sends.
type requests struct {
	started  bool // the first message, which has no type, is over
	rest     []byte
	prepared map[string]string // SQL by the name of the statement
	portals  map[string]string // SQL by the name of the portal
	executed []string          // since the server was last asked for an answer
}

// add reads some bytes. It returns what is executed by them and how many answers end what the server
// sends back: 0 if nothing is executed, or the rest of it is still to come.
func (r *requests) add(b []byte) (executed []string, answers int) {
	r.rest = append(r.rest, b...)
	for {
		head, body, ok := r.next()
		if !ok {
			break
		}
		if r.message(head, body) {
			answers++
		}
	}
	if answers == 0 || len(r.executed) == 0 {
		return nil, 0
	}
	executed, r.executed = r.executed, nil
	return executed, answers
}

// next takes a whole message off the rest.
func (r *requests) next() (head byte, body []byte, ok bool) {
	from := headerBytes
	if !r.started {
		from = headerBytes - 1
	}
	if len(r.rest) < from {
		return 0, nil, false
	}
	end := from + int(binary.BigEndian.Uint32(r.rest[from-4:])) - 4
	if end < from || len(r.rest) < end {
		return 0, nil, false
	}
	if r.started {
		head = r.rest[0]
	}
	body, r.rest, r.started = r.rest[from:end], r.rest[end:], true
	return head, body, true
}

// message notes one, and reports whether the server answers it by the end of an answer.
func (r *requests) message(head byte, body []byte) (answered bool) {
	name, after, _ := bytes.Cut(body, []byte{0})
	text, _, _ := bytes.Cut(after, []byte{0})
	switch head {
	case 'P': // Parse: name, SQL
		r.prepared[string(name)] = string(text)
	case 'B': // Bind: portal, name
		r.portals[string(name)] = r.prepared[string(text)]
	case 'E': // Execute: portal
		r.executed = append(r.executed, r.portals[string(name)])
	case 'Q': // Query: SQL
		r.executed = append(r.executed, string(name))
		return true
	case 'c': // CopyDone
		r.executed = append(r.executed, "the end of COPY")
		return true
	case 'S': // Sync
		return true
	}
	return false
}

// replies reads what the server sends.
type replies struct {
	head    [headerBytes + 4]byte // the beginning of the message at hand
	have    int                   // bytes of head
	left    int                   // bytes of the message that are still to come
	status  byte                  // of the transaction, at the end of the last answer
	backend uint32                // the process of the server
}

// add reads some bytes and returns how many answers have ended in them.
func (r *replies) add(b []byte) (ended int) {
	for len(b) > 0 {
		if r.have < headerBytes {
			n := copy(r.head[r.have:headerBytes], b)
			r.have, b = r.have+n, b[n:]
			if r.have == headerBytes {
				r.left = int(binary.BigEndian.Uint32(r.head[1:])) - 4
			}
		} else {
			n := min(r.left, len(b))
			r.have += copy(r.head[r.have:], b[:n])
			r.left, b = r.left-n, b[n:]
		}
		if r.have >= headerBytes && r.left <= 0 {
			ended += r.message()
			r.have = 0
		}
	}
	return ended
}

func (r *replies) message() (ended int) {
	switch r.head[0] {
	case 'Z': // ReadyForQuery
		r.status = r.head[headerBytes]
		return 1
	case 'K': // BackendKeyData
		r.backend = binary.BigEndian.Uint32(r.head[headerBytes:])
	case 'G': // CopyInResponse: the server waits for the rows
		return 1
	}
	return 0
}

// refusal is what a server says that refuses a statement, as often as the client waits for an answer.
func refusal(code, text string, status byte, answers int) []byte {
	said := &pgproto3.ErrorResponse{Severity: "ERROR", SeverityUnlocalized: "ERROR", Code: code, Message: text}
	var b []byte
	for range answers {
		b = must(said.Encode(b))
		b = must((&pgproto3.ReadyForQuery{TxStatus: status}).Encode(b))
	}
	return b
}

func query(sql string) []byte { return must((&pgproto3.Query{String: sql}).Encode(nil)) }

// must is for messages that are never too long.
func must(b []byte, err error) []byte {
	if err != nil {
		panic(err)
	}
	return b
}
