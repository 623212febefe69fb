package outboxredis

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/internal/redisconn"
	"github.com/holdfast-go/holdfast/outbox/driver"
)

// maxPipeline bounds the bytes of bodies in one pipeline, so that Config.Timeout suffices on a slow connection.
const maxPipeline = 4 << 20

// cluster is the client of a Redis Cluster.
type cluster interface {
	MasterForKey(ctx context.Context, key string) (*redis.Client, error)
}

// item is a message in flight.
type item struct {
	ctx  context.Context
	args *redis.XAddArgs
	size int
	done func(error)
}

// send works until the queue is empty.
func (p *Publisher) send() {
	for {
		p.mu.Lock()
		items := p.queue
		p.queue = nil
		p.sending = len(items) > 0
		p.mu.Unlock()
		if len(items) == 0 {
			return
		}
		for len(items) > 0 {
			n := portion(items)
			var sending sync.WaitGroup
			for _, some := range p.apart(items[:n]) {
				sending.Go(func() { p.sendTogether(some) })
			}
			sending.Wait()
			items = items[n:]
		}
	}
}

// portion returns how many items form a pipeline, at least one.
func portion(items []item) int {
	size := 0
	for n, it := range items {
		size += it.size
		if n > 0 && size > maxPipeline {
			return n
		}
	}
	return len(items)
}

// apart gives each stream of a Cluster its own pipeline. While one node is silent, the client reports the whole
// pipeline as failed, including messages that other nodes confirmed, and those would be stored again.
func (p *Publisher) apart(items []item) (all [][]item) {
	if _, ok := p.client.(cluster); !ok {
		return [][]item{items}
	}
	at := map[string]int{}
	for _, it := range items {
		i, ok := at[it.args.Stream]
		if !ok {
			i = len(all)
			at[it.args.Stream], all = i, append(all, nil)
		}
		all[i] = append(all[i], it)
	}
	return all
}

// sendTogether reports the outcome of each item. If a command is too large, Redis closes the connection without a
// reply. Items of such a connection are sent one by one; otherwise the large message would fail all others
// forever.
func (p *Publisher) sendTogether(items []item) {
	var doubtful []item
	for i, err := range p.exec(items) {
		if len(items) > 1 && broken(err) {
			doubtful = append(doubtful, items[i])
			continue
		}
		p.report(items[i], classify(err))
	}
	for i, it := range doubtful {
		err := p.sendAlone(it)
		p.report(it, err)
		if driver.ClassOf(err) == driver.Unavailable {
			for _, other := range doubtful[i+1:] {
				p.report(other, err)
			}
			return
		}
	}
}

// sendAlone fails a message if the connection closes twice because of it, while the server answers others.
func (p *Publisher) sendAlone(it item) error {
	var err error
	for range 2 {
		err = p.exec([]item{it})[0]
		if !broken(err) || p.answers(it) != nil {
			return classify(err)
		}
	}
	return &driver.PublishError{Class: driver.Retryable, Err: fmt.Errorf("redis closes the connection, the message may be too large: %w", err)}
}

// answers returns nil if the server of a message's stream answers. A Cluster has several servers.
func (p *Publisher) answers(it item) error {
	nodes, ok := p.client.(cluster)
	if !ok {
		return p.Ready(it.ctx)
	}
	_, err := redisconn.Within(it.ctx, p.cfg.Timeout, func(ctx context.Context) (string, error) {
		node, err := nodes.MasterForKey(ctx, it.args.Stream)
		if err != nil {
			return "", err
		}
		return node.Ping(ctx).Result()
	})
	return err
}

func (p *Publisher) report(it item, err error) {
	<-p.room
	it.done(err)
}

// exec runs one pipeline and returns the error of each item.
func (p *Publisher) exec(items []item) []error {
	pipe := p.client.Pipeline()
	answers := make([]*redis.StringCmd, len(items))
	errs := make([]error, len(items))
	for i, it := range items {
		if errs[i] = it.ctx.Err(); errs[i] == nil {
			answers[i] = pipe.XAdd(it.ctx, it.args)
		}
	}
	// The error is the error of one command, or of all of them.
	_, late := redisconn.Within(context.WithoutCancel(items[0].ctx), p.cfg.Timeout, func(ctx context.Context) (struct{}, error) {
		_, _ = pipe.Exec(ctx)
		return struct{}{}, nil
	})
	redisconn.Failed(items[0].ctx, p.client, late)
	for i, answer := range answers {
		switch {
		case answer == nil:
		case late != nil: // the client may still write to the reply
			errs[i] = late
		default:
			errs[i] = answer.Err()
			redisconn.Failed(items[i].ctx, p.client, errs[i])
		}
	}
	return errs
}

// classes maps error replies of Redis that concern more than one message, or a stream, to classes. The first
// prefix that matches counts.
var classes = []struct {
	begin string
	class driver.Class
}{
	{"OOM ", driver.Blocked},
	{"MISCONF ", driver.Blocked}, // the server cannot save and refuses writes
	{"NOREPLICAS ", driver.Blocked},
	{"WRONGTYPE ", driver.Unroutable}, // the key of the stream has another type
	{"BUSY ", driver.Unavailable},
	{"LOADING ", driver.Unavailable},
	{"READONLY ", driver.Unavailable},
	{"MASTERDOWN ", driver.Unavailable},
	{"CLUSTERDOWN ", driver.Unavailable},
	{"TRYAGAIN ", driver.Unavailable},
	{"NOAUTH ", driver.Unavailable},
	{"WRONGPASS ", driver.Unavailable},
	{"DENIED ", driver.Unavailable}, // protected mode
	{"ERR max number of clients", driver.Unavailable},
	{"ERR unknown command", driver.Unavailable}, // a server without streams
}

// classify converts the outcome of an XADD to the errors of Publisher. An error that is not a reply of Redis is a
// network fault.
func classify(err error) error {
	if err == nil {
		return nil
	}
	var answer redis.Error
	if !errors.As(err, &answer) {
		return &driver.PublishError{Class: driver.Unavailable, Err: err}
	}
	return &driver.PublishError{Class: classOf(answer.Error()), Err: err}
}

func classOf(answer string) driver.Class {
	for _, c := range classes {
		if strings.HasPrefix(answer, c.begin) {
			return c.class
		}
	}
	if strings.HasPrefix(answer, "NOPERM ") {
		if strings.Contains(answer, "key") {
			return driver.Unroutable // the user may have access to another stream
		}
		return driver.Unavailable
	}
	return driver.Retryable
}

// broken reports whether Redis closed the connection.
func broken(err error) bool {
	if op, ok := errors.AsType[*net.OpError](err); ok {
		return op.Op != "dial" && !op.Timeout()
	}
	return errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF)
}
