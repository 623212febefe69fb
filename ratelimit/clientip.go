package ratelimit

import (
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"strings"
)

// ClientIPConfig configures ClientIP. The zero value uses the address of the connection, which is right if clients
// connect directly.
type ClientIPConfig struct {
	// TrustedProxies are the networks of the proxies in front. The addresses that they report are trusted. The client
	// is the last address that is not one of them. A peer on a unix socket is on this host, has no address, and is
	// trusted too. Not together with Hops. Optional.
	TrustedProxies []netip.Prefix
	// Hops is the number of proxies in front, at most 32, for proxies with unknown addresses. The client is the
	// address that the outermost proxy reports. No client may be able to bypass the proxies. Default: none.
	Hops int
	// Header is the header in which proxies report addresses; each proxy appends the address of its peer. A header
	// that the outermost proxy sets to a single address also works, with Hops 1. Default: X-Forwarded-For.
	Header string
	// IPv6Prefix is the length of the network that counts as one client, because a subscriber has many addresses: 1
	// to 128. Default: 64.
	IPv6Prefix int
}

// ClientIP returns a key function for the client's address. Addresses that a client itself writes into the header
// have no effect. A request without a client address gives ErrNoKey. ClientIP returns an error that names every wrong
// field.
func ClientIP(cfg ClientIPConfig) (func(*http.Request) (string, error), error) {
	var errs []error
	if len(cfg.TrustedProxies) > 0 && cfg.Hops != 0 {
		errs = append(errs, errors.New("ratelimit: ClientIPConfig has both TrustedProxies and Hops"))
	}
	trusted, err := unmapped(cfg.TrustedProxies)
	errs = append(errs, err)
	cfg.TrustedProxies = trusted
	if cfg.Hops < 0 || cfg.Hops > maxHops {
		errs = append(errs, fmt.Errorf("ratelimit: ClientIPConfig.Hops is %d, must lie between 0 and %d", cfg.Hops, maxHops))
	}
	if cfg.IPv6Prefix == 0 {
		cfg.IPv6Prefix = 64
	}
	if cfg.IPv6Prefix < 1 || cfg.IPv6Prefix > 128 {
		errs = append(errs, fmt.Errorf("ratelimit: ClientIPConfig.IPv6Prefix is %d, must lie between 1 and 128", cfg.IPv6Prefix))
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	if cfg.Header == "" {
		cfg.Header = "X-Forwarded-For"
	}
	return func(r *http.Request) (string, error) {
		addr, err := cfg.find(r)
		if err != nil {
			return "", err
		}
		return cfg.key(addr), nil
	}, nil
}

// unmapped converts networks of IPv4-mapped IPv6 addresses to IPv4, the form in which addresses are compared.
func unmapped(networks []netip.Prefix) (all []netip.Prefix, err error) {
	const mapped = 96 // bits before the IPv4 address
	for _, p := range networks {
		if p.Addr().Is4In6() {
			p = netip.PrefixFrom(p.Addr().Unmap(), p.Bits()-mapped)
		}
		if !p.IsValid() {
			return nil, errors.New("ratelimit: ClientIPConfig.TrustedProxies holds an invalid prefix")
		}
		all = append(all, p)
	}
	return all, nil
}

// maxHops limits the number of proxies in a row.
const maxHops = 32

func (c *ClientIPConfig) find(r *http.Request) (netip.Addr, error) {
	if c.Hops == 0 {
		peer, ok := parseIP(r.RemoteAddr)
		switch {
		case ok && !c.trusts(peer):
			return peer, nil
		case !ok && len(c.TrustedProxies) == 0:
			return netip.Addr{}, fmt.Errorf("%w: the connection's address %.100q is no IP address: set ClientIPConfig.Hops or TrustedProxies if a proxy is in front", ErrNoKey, r.RemoteAddr)
		case !ok && !overUnixSocket(r):
			return netip.Addr{}, fmt.Errorf("%w: the connection's address %.100q is no IP address", ErrNoKey, r.RemoteAddr)
		}
	}
	reported := r.Header.Values(c.Header)
	for hop := 1; hop <= maxHops; hop++ {
		text, rest, ok := lastOf(reported)
		if !ok {
			return netip.Addr{}, fmt.Errorf("%w: %s has only %d addresses", ErrNoKey, c.Header, hop-1)
		}
		addr, ok := parseIP(text)
		if !ok && (c.Hops == 0 || hop == c.Hops) {
			return netip.Addr{}, fmt.Errorf("%w: %s has no valid address", ErrNoKey, c.Header)
		}
		if hop == c.Hops || c.Hops == 0 && !c.trusts(addr) {
			return addr, nil
		}
		reported = rest
	}
	return netip.Addr{}, fmt.Errorf("%w: more than %d proxies", ErrNoKey, maxHops)
}

// overUnixSocket reports whether a request came over a unix socket. Some servers do not set their own address in the
// context. For these, a client address in the form of a path shows it.
func overUnixSocket(r *http.Request) bool {
	if own, ok := r.Context().Value(http.LocalAddrContextKey).(net.Addr); ok {
		return own.Network() == "unix"
	}
	return r.RemoteAddr == "" || r.RemoteAddr[0] == '@' || r.RemoteAddr[0] == '/'
}

func (c *ClientIPConfig) trusts(addr netip.Addr) bool {
	for _, p := range c.TrustedProxies {
		if p.Contains(addr) {
			return true
		}
	}
	return false
}

// lastOf splits the last element off a header of comma-separated lists.
func lastOf(lines []string) (last string, rest []string, ok bool) {
	if len(lines) == 0 {
		return "", nil, false
	}
	n := len(lines) - 1
	line := lines[n]
	comma := strings.LastIndexByte(line, ',')
	if comma < 0 {
		return strings.TrimSpace(line), lines[:n], true
	}
	rest = append(append(make([]string, 0, n+1), lines[:n]...), line[:comma])
	return strings.TrimSpace(line[comma+1:]), rest, true
}

// parseIP parses an address with or without a port, brackets or quotes.
func parseIP(text string) (netip.Addr, bool) {
	text = strings.Trim(text, `"`)
	if ap, err := netip.ParseAddrPort(text); err == nil {
		return ap.Addr().Unmap().WithZone(""), true
	}
	if strings.HasPrefix(text, "[") && strings.HasSuffix(text, "]") {
		text = text[1 : len(text)-1]
	}
	addr, err := netip.ParseAddr(text)
	return addr.Unmap().WithZone(""), err == nil
}

func (c *ClientIPConfig) key(addr netip.Addr) string {
	if addr.Is4() || c.IPv6Prefix == 128 {
		return addr.String()
	}
	network, err := addr.Prefix(c.IPv6Prefix)
	if err != nil { // the length was checked
		return addr.String()
	}
	return network.String()
}
