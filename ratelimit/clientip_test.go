package ratelimit_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"

	"github.com/holdfast-go/holdfast/ratelimit"
)

func proxies(networks ...string) (all []netip.Prefix) {
	for _, n := range networks {
		all = append(all, netip.MustParsePrefix(n))
	}
	return all
}

func TestClientIP(t *testing.T) {
	t.Parallel()
	direct := ratelimit.ClientIPConfig{}
	behind := ratelimit.ClientIPConfig{TrustedProxies: proxies("10.0.0.0/8", "2001:db8:ffff::/48")}
	hops := ratelimit.ClientIPConfig{Hops: 2}
	cdn := ratelimit.ClientIPConfig{Hops: 1, Header: "CF-Connecting-IP"}
	for name, c := range map[string]struct {
		cfg    ratelimit.ClientIPConfig
		peer   string
		header []string
		want   string // "" is ErrNoKey
	}{
		"direct":                         {direct, "192.0.2.7:1234", nil, "192.0.2.7"},
		"direct, forged":                 {direct, "192.0.2.7:1234", []string{"8.8.8.8"}, "192.0.2.7"},
		"IPv6 is a /64":                  {direct, "[2001:db8:1:2:3:4:5:6]:1", nil, "2001:db8:1:2::/64"},
		"the zone is dropped":            {direct, "[fe80::1%eth0]:1", nil, "fe80::/64"},
		"IPv4 in IPv6":                   {direct, "[::ffff:192.0.2.7]:1", nil, "192.0.2.7"},
		"one address":                    {ratelimit.ClientIPConfig{IPv6Prefix: 128}, "[2001:db8::1]:1", nil, "2001:db8::1"},
		"a /56":                          {ratelimit.ClientIPConfig{IPv6Prefix: 56}, "[2001:db8:1:2ff::1]:1", nil, "2001:db8:1:200::/56"},
		"no address":                     {direct, "@", nil, ""},
		"empty address":                  {direct, "", nil, ""},
		"no address, two hops":           {hops, "@", []string{"8.8.8.8, 192.0.2.7, 172.16.0.2"}, "192.0.2.7"},
		"no address, proxied":            {behind, "@", []string{"8.8.8.8, 192.0.2.7, 10.2.2.2"}, "192.0.2.7"},
		"a path, proxied":                {behind, "/run/proxy.sock", []string{"192.0.2.7"}, "192.0.2.7"},
		"no address, no header":          {behind, "@", nil, ""},
		"garbage, proxied":               {behind, "evil", []string{"192.0.2.7"}, ""},
		"proxied":                        {behind, "10.1.1.1:1", []string{"192.0.2.7"}, "192.0.2.7"},
		"proxied, forged in front":       {behind, "10.1.1.1:1", []string{"1.1.1.1, 8.8.8.8, 192.0.2.7"}, "192.0.2.7"},
		"proxied, forged as a proxy":     {behind, "10.1.1.1:1", []string{"10.9.9.9, 192.0.2.7"}, "192.0.2.7"},
		"proxied, garbage in front":      {behind, "10.1.1.1:1", []string{"x, \x00, 192.0.2.7"}, "192.0.2.7"},
		"two proxies":                    {behind, "10.1.1.1:1", []string{"8.8.8.8, 192.0.2.7, 10.2.2.2"}, "192.0.2.7"},
		"several lines":                  {behind, "10.1.1.1:1", []string{"8.8.8.8", "192.0.2.7", "10.2.2.2, 10.3.3.3"}, "192.0.2.7"},
		"with ports":                     {behind, "10.1.1.1:1", []string{"192.0.2.7:99, 10.2.2.2:80"}, "192.0.2.7"},
		"IPv6 in brackets":               {behind, "[2001:db8:ffff::1]:1", []string{`"[2001:db8:1:2::9]:443"`}, "2001:db8:1:2::/64"},
		"proxies written as IPv6":        {ratelimit.ClientIPConfig{TrustedProxies: proxies("::ffff:10.0.0.0/104")}, "10.1.1.1:1", []string{"192.0.2.7"}, "192.0.2.7"},
		"bypassing the proxy":            {behind, "192.0.2.9:1", []string{"192.0.2.7"}, "192.0.2.9"},
		"no header from the proxy":       {behind, "10.1.1.1:1", nil, ""},
		"only proxies in the header":     {behind, "10.1.1.1:1", []string{"10.2.2.2"}, ""},
		"garbage from the proxy":         {behind, "10.1.1.1:1", []string{"192.0.2.7, unknown"}, ""},
		"empty address from the proxy":   {behind, "10.1.1.1:1", []string{"192.0.2.7,"}, ""},
		"an endless chain":               {behind, "10.1.1.1:1", []string{strings.Repeat("10.0.0.1,", 5000) + "10.0.0.1"}, ""},
		"two hops":                       {hops, "172.16.0.1:1", []string{"8.8.8.8, 192.0.2.7, 172.16.0.2"}, "192.0.2.7"},
		"two hops, too few":              {hops, "172.16.0.1:1", []string{"192.0.2.7"}, ""},
		"a CDN's header":                 {cdn, "172.16.0.1:1", []string{"192.0.2.7"}, "192.0.2.7"},
		"a CDN's header, not an address": {cdn, "172.16.0.1:1", []string{"evil"}, ""},
	} {
		key, err := ratelimit.ClientIP(c.cfg)
		if err != nil {
			t.Fatal(err)
		}
		r := httptest.NewRequest(http.MethodPost, "/", nil)
		r.RemoteAddr = c.peer
		header := c.cfg.Header
		if header == "" {
			header = "X-Forwarded-For"
		}
		r.Header[http.CanonicalHeaderKey(header)] = c.header
		got, err := key(r)
		if got != c.want || (err != nil) != (c.want == "") || err != nil && !errors.Is(err, ratelimit.ErrNoKey) {
			t.Errorf("%s: got %q, %v, want %q", name, got, err, c.want)
		}
	}
}

// Behind a proxy on a unix socket, the reported addresses distinguish clients.
func TestClientIP_overUnixSocket(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		cfg  ratelimit.ClientIPConfig
		want string
	}{
		"hops":            {ratelimit.ClientIPConfig{Hops: 1}, "192.0.2.7"},
		"trusted proxies": {ratelimit.ClientIPConfig{TrustedProxies: proxies("10.0.0.0/8")}, "192.0.2.7"},
		"direct":          {ratelimit.ClientIPConfig{}, ""},
	} {
		key, err := ratelimit.ClientIP(c.cfg)
		if err != nil {
			t.Fatal(err)
		}
		socket := filepath.Join(t.TempDir(), "s")
		listener, err := net.Listen("unix", socket)
		if err != nil {
			t.Fatal(err)
		}
		server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			client, _ := key(r)
			fmt.Fprint(w, client)
		}))
		server.Listener.Close()
		server.Listener = listener
		server.Start()
		defer server.Close()
		client := http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", socket)
		}}}
		defer client.CloseIdleConnections()
		request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://api/", nil)
		if err != nil {
			t.Fatal(err)
		}
		request.Header.Set("X-Forwarded-For", "8.8.8.8, 192.0.2.7")
		answer, err := client.Do(request)
		if err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(answer.Body)
		answer.Body.Close()
		if string(got) != c.want || err != nil {
			t.Errorf("%s: the client is %q, error %v, want %q", name, got, err, c.want)
		}
	}
}

func TestClientIPReportsEveryViolation(t *testing.T) {
	t.Parallel()
	if _, err := ratelimit.ClientIP(ratelimit.ClientIPConfig{TrustedProxies: proxies("::ffff:10.0.0.0/90")}); err == nil {
		t.Error("accepted a network of proxies that is wider than IPv4")
	}
	_, err := ratelimit.ClientIP(ratelimit.ClientIPConfig{TrustedProxies: make([]netip.Prefix, 1), Hops: 99, IPv6Prefix: 129})
	for _, want := range []string{"both", "invalid prefix", "Hops", "IPv6Prefix"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v does not name %s", err, want)
		}
	}
}

// Text that a client writes in front of its proxy's address has no effect.
func FuzzForgedForwardedFor(f *testing.F) {
	f.Add("8.8.8.8, 10.0.0.1")
	f.Add(",,\"[::1")
	key, err := ratelimit.ClientIP(ratelimit.ClientIPConfig{TrustedProxies: proxies("10.0.0.0/8")})
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, forged string) {
		r := httptest.NewRequest(http.MethodPost, "/", nil)
		r.RemoteAddr = "10.0.0.1:1"
		r.Header["X-Forwarded-For"] = []string{forged + ", 192.0.2.7"}
		if got, err := key(r); err != nil || got != "192.0.2.7" {
			t.Errorf("%q made it %q, %v", forged, got, err)
		}
	})
}

// For any input the key is an address in its canonical form, or there is no key.
func FuzzClientIP(f *testing.F) {
	f.Add("10.0.0.1:1", "192.0.2.7", "8.8.8.8, 10.2.2.2:80", uint8(0))
	f.Add("[::ffff:10.0.0.1%eth0]:1", `"[2001:db8::1]:443", ,`, "fe80::1%25", uint8(2))
	f.Fuzz(func(t *testing.T, peer, line1, line2 string, hops uint8) {
		cfg := ratelimit.ClientIPConfig{Hops: int(hops % 33)}
		if cfg.Hops == 0 {
			cfg.TrustedProxies = proxies("10.0.0.0/8", "fe80::/10")
		}
		key, err := ratelimit.ClientIP(cfg)
		if err != nil {
			t.Fatal(err)
		}
		r := httptest.NewRequest(http.MethodPost, "/", nil)
		r.RemoteAddr = peer
		r.Header["X-Forwarded-For"] = []string{line1, line2}
		got, err := key(r)
		if err != nil {
			if got != "" || !errors.Is(err, ratelimit.ErrNoKey) {
				t.Errorf("got %q, %v", got, err)
			}
			return
		}
		addr, aErr := netip.ParseAddr(got)
		network, nErr := netip.ParsePrefix(got)
		switch {
		case aErr == nil && addr.Is4() && addr.String() == got:
		case nErr == nil && network.Bits() == 64 && network.Masked().String() == got && !network.Addr().Is4In6() && network.Addr().Zone() == "":
		default:
			t.Errorf("the key is %q", got)
		}
	})
}
