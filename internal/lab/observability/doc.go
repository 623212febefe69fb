// Package observability tests what an operator gives to Prometheus and Grafana, in modules/operator/observability, against the
// metrics that the code exports: the dashboard, the rules, and the tests of the rules for promtool. At night a Prometheus scrapes
// the shop, and promtool runs the tests of the rules.
package observability
