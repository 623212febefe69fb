package main

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/txretry"
)

// The layers that a shop on real servers can do without.
const (
	layerLimits   = "limits"
	layerKeys     = "keys"
	layerMessages = "messages"
)

// layers are left out, which shows what each of them costs.
type layers []string

func (l *layers) String() string { return strings.Join(*l, ",") }

// Set implements flag.Value.
func (l *layers) Set(text string) error {
	*l = strings.Split(text, ",")
	for _, name := range *l {
		if !slices.Contains([]string{layerLimits, layerKeys, layerMessages}, name) {
			return fmt.Errorf("no layer is called %q; there are %s, %s and %s", name, layerLimits, layerKeys, layerMessages)
		}
	}
	return nil
}

func (l layers) has(name string) bool { return slices.Contains(l, name) }

// keyless runs transactions and keeps no response.
type keyless struct{ transactor *txretry.Manager }

// DoWith implements postgres.Once.
func (k keyless) DoWith(ctx context.Context, o txretry.Options,
	fn func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error),
) (resp idempotency.Response, err error) {
	err = k.transactor.DoWith(ctx, o, func(ctx context.Context, tx pgx.Tx) (err error) {
		resp, err = fn(ctx, tx)
		return err
	})
	return resp, err
}

// silent stores no messages.
type silent struct{}

// Write implements postgres.Outbox.
func (silent) Write(context.Context, pgx.Tx, ...outbox.Message) error { return nil }
