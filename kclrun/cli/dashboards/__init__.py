"""`kclrun dashboards`: what a Grafana and a Prometheus show and watch of a fleet."""
