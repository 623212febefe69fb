package main

import (
	"bytes"
	"encoding/json"
	"strings"
)

// row is one part of the dashboard.
type row struct {
	title  string
	panels []panel
}

// panel is one graph.
type panel struct {
	title, note string
	unit        string // as Grafana names it
	queries     []query
}

// query is one PromQL expression. In it $s stands for the selection of job and instance, and $r for the
// interval of rates.
type query struct {
	expr, legend string
	// rare marks what a shop that is well has no data for, and servers what it has only on real ones.
	rare, servers bool
}

// forGrafana writes the expression with the variables of the dashboard.
func (q query) forGrafana() string {
	return strings.NewReplacer("$s", `job=~"$job",instance=~"$instance"`, "$r", "$__rate_interval").Replace(q.expr)
}

// The geometry of the dashboard: Grafana's grid is 24 wide.
const (
	panelWidth  = 8
	panelHeight = 7
	perLine     = 24 / panelWidth
)

type object map[string]any

// datasource is the variable that chooses the Prometheus.
var datasource = object{"type": "prometheus", "uid": "${datasource}"}

// dashboardJSON returns the dashboard as Grafana imports it.
func dashboardJSON(rows []row) ([]byte, error) {
	var panels []object
	y, id := 0, 0
	add := func(p object, x, width, height int) {
		id++
		p["id"], p["gridPos"] = id, object{"x": x, "y": y, "w": width, "h": height}
		panels = append(panels, p)
	}
	for _, r := range rows {
		add(object{"type": "row", "title": r.title, "collapsed": false, "panels": []object{}}, 0, 24, 1)
		y++
		for i, p := range r.panels {
			add(p.json(), i%perLine*panelWidth, panelWidth, panelHeight)
			if i%perLine == perLine-1 || i == len(r.panels)-1 {
				y += panelHeight
			}
		}
	}
	var out bytes.Buffer
	encoder := json.NewEncoder(&out)
	encoder.SetEscapeHTML(false)
	encoder.SetIndent("", "  ")
	err := encoder.Encode(object{
		"uid": "holdfast", "title": "Holdfast", "tags": []string{"holdfast"},
		"schemaVersion": 39, "editable": true, "timezone": "browser", "refresh": "30s",
		"time":       object{"from": "now-1h", "to": "now"},
		"templating": object{"list": variables()},
		"panels":     panels,
	})
	return out.Bytes(), err
}

func (p panel) json() object {
	var targets []object
	for i, q := range p.queries {
		targets = append(targets, object{
			"refId": string(rune('A' + i)), "datasource": datasource, "expr": q.forGrafana(), "legendFormat": q.legend, "range": true,
		})
	}
	return object{
		"type": "timeseries", "title": p.title, "description": p.note, "datasource": datasource, "targets": targets,
		"fieldConfig": object{
			"defaults":  object{"unit": p.unit, "custom": object{"axisSoftMin": 0, "fillOpacity": 10, "showPoints": "never"}},
			"overrides": []object{},
		},
		"options": object{
			"legend":  object{"displayMode": "list", "placement": "bottom", "showLegend": true},
			"tooltip": object{"mode": "multi", "sort": "desc"},
		},
	}
}

// variables choose the Prometheus, and whose metrics are shown.
func variables() []object {
	choice := func(name, query string) object {
		return object{
			"name": name, "label": name, "type": "query", "datasource": datasource, "query": query, "definition": query,
			"refresh": 2, "multi": true, "includeAll": true, "allValue": ".*", "sort": 1,
			"current": object{"text": "All", "value": "$__all"},
		}
	}
	return []object{
		{"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus", "current": object{}},
		choice("job", `label_values(`+anyMetric+`, job)`),
		choice("instance", `label_values(up{job=~"$job"}, instance)`),
	}
}
