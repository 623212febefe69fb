package operator

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"time"

	"github.com/spf13/cobra"
)

// pageShutdown bounds how long the command page waits for answers that are under way.
const pageShutdown = 5 * time.Second

// page serves the page to whoever runs the command.
func (o *Operator) page() *cobra.Command {
	cmd := &cobra.Command{
		Use: "page", Short: "Serve the operator as a web page, until interrupted", Args: noArguments,
		Long: "Serve the operator as a web page, until interrupted. Everybody who reaches the address is who runs the command, so\n" +
			"leave it at one of this machine, or mount the page in a program that asks who its visitors are.",
	}
	addr := cmd.Flags().String("addr", "127.0.0.1:8970", "`address` to listen on")
	access := addAccessFlags(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if err := (change{By: access.By}).validate(); err != nil || access.Change && access.By == "" {
			return usagef("page: --by must be 1 to 128 bytes without control characters")
		}
		page, err := o.Handler(PageConfig{Authorize: func(r *http.Request) (Access, error) { return *access, direct(r) }})
		if err != nil {
			return err
		}
		listener, err := (&net.ListenConfig{}).Listen(cmd.Context(), "tcp", *addr)
		if err != nil {
			return usagef("page: --addr: %w", err)
		}
		fmt.Fprintf(cmd.OutOrStdout(), "http://%s/\n", listener.Addr())
		return servePage(cmd.Context(), listener, page)
	}
	return cmd
}

// servePage serves until ctx ends.
func servePage(ctx context.Context, listener net.Listener, page *Page) error {
	server := &http.Server{
		Handler: page, ReadHeaderTimeout: 10 * time.Second, ReadTimeout: 30 * time.Second, WriteTimeout: 2 * time.Minute,
		IdleTimeout: 2 * time.Minute, MaxHeaderBytes: 128 << 10, ErrorLog: slog.NewLogLogger(slog.Default().Handler(), slog.LevelWarn),
	}
	server.RegisterOnShutdown(page.Close)
	defer page.Close() // what it has begun is noted before the process ends
	ended := make(chan error, 1)
	stop := context.AfterFunc(ctx, func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), pageShutdown)
		defer cancel()
		ended <- server.Shutdown(ctx)
	})
	defer stop()
	if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return <-ended
}

// direct refuses a request under a name that is not this machine's own. A site that has its name lead to a
// visitor's own machine would otherwise count as the page itself: DNS rebinding.
func direct(r *http.Request) error {
	host, _, err := net.SplitHostPort(r.Host)
	if err != nil {
		host = r.Host
	}
	if _, err := netip.ParseAddr(host); err == nil || host == "localhost" {
		return nil
	}
	return fmt.Errorf("operator: the page has no name %.100q: use its address", host)
}
