package faults_test

import (
	"fmt"
	"os"
	"slices"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/lab/shop"
	"github.com/holdfast-go/holdfast/internal/pgtest"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// links are one role's ways to the servers.
type links struct{ database, redis, broker *testenv.Proxy }

// shopRoles are the processes of a shop. The short form does with one consumer and one sweeper.
func shopRoles(t testing.TB) []string {
	t.Helper()
	roles := []string{"api", "api", "relay", "relay", "consumer", "sweeper"}
	if long(t) {
		roles = append(roles, "consumer", "sweeper")
	}
	return roles
}

// reservationShop is the example as processes, each role with links of its own, and with customers.
type reservationShop struct {
	t     *testing.T
	roles []*role
	links map[string]links // by role
	db    *pgxpool.Pool    // past the links
	crowd *customers
}

// openShop starts all roles and the customers.
func openShop(t *testing.T, servers shop.Servers) *reservationShop {
	t.Helper()
	s := &reservationShop{t: t, links: map[string]links{}, db: pgtest.Pool(t, servers.Database, 4)}
	for _, name := range shopRoles(t) {
		if _, ok := s.links[name]; !ok {
			s.links[name] = links{
				testenv.NewProxy(t, servers.Database), testenv.NewProxy(t, servers.Redis), testenv.NewProxy(t, servers.Broker),
			}
		}
		l := s.links[name]
		env := append(os.Environ(), shop.Servers{Database: l.database.URL(), Redis: l.redis.URL(), Broker: l.broker.URL()}.Env()...)
		s.roles = append(s.roles, startRole(t, env, name,
			"-hold=2s", "-user-limit=1000000000", "-global-limit=0"))
	}
	t.Cleanup(func() {
		if t.Failed() {
			for _, r := range s.roles {
				t.Logf("%s said:\n%s", r.name, tail(r.log.String()))
			}
		}
	})
	s.crowd = newCustomers(t, s)
	return s
}

// tail is the end of a text: a fault may cost many lines.
func tail(text string) string {
	const most = 6000
	if len(text) <= most {
		return text
	}
	return fmt.Sprintf("(%d bytes before)\n%s", len(text)-most, text[len(text)-most:])
}

// each does something to the links of the named roles, or of all.
func (s *reservationShop) each(do func(links), names ...string) {
	for name, l := range s.links {
		if len(names) == 0 || slices.Contains(names, name) {
			do(l)
		}
	}
}

// named are the processes of a role.
func (s *reservationShop) named(name string) []*role {
	var found []*role
	for _, r := range s.roles {
		if r.name == name {
			found = append(found, r)
		}
	}
	return found
}

// audit sends the customers home and wants every reservation to have come to one end, that the consumers have heard of
// once, and every seat to be free or confirmed.
func (s *reservationShop) audit() {
	s.t.Helper()
	s.crowd.stop()
	for what, sql := range map[string]string{
		"reservations whose two messages did not take effect once": `select count(*) from reservations r
			full join reservation_states s on s.reservation_id = r.id
			where r.status is distinct from s.status or r.status = 'held' or s.messages <> 2`,
		"seats that belong to no reservation that has them": `select count(*) from seats s
			left join reservations r on r.id = s.reservation_id where s.state <> 'free' and
			(r.id is null or r.status <> 'confirmed' or s.state <> 'confirmed' or not s.number = any(r.seats))`,
		"confirmed reservations that lack a seat": `select count(*) from reservations r where status = 'confirmed'
			and (select count(*) from seats s where s.reservation_id = r.id) <> cardinality(r.seats)`,
	} {
		testenv.Eventually(s.t, recoveryPatience, func() error {
			var n int
			if err := s.db.QueryRow(s.t.Context(), sql).Scan(&n); err != nil {
				return err
			}
			if n > 0 {
				return fmt.Errorf("%d %s", n, what)
			}
			return nil
		})
	}
}
