"""A worker that shows its locks to Prometheus, at http://127.0.0.1:9464/metrics.

    pip install '.[otel]' opentelemetry-sdk opentelemetry-exporter-prometheus
    INTERLOCK_URL=redis://localhost:6379/0 python app.py [PORT]

Start it twice, with two ports: then the workers wait for each other.
"""

from __future__ import annotations

import random
import sys
import time

from opentelemetry import metrics
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from prometheus_client import start_http_server

from interlock import AcquireTimeout, Interlock, LeaseLost
from interlock.contrib import otel


def main(port: int) -> None:
    metrics.set_meter_provider(MeterProvider([PrometheusMetricReader()]))
    otel.instrument()
    server, _ = start_http_server(port, "127.0.0.1")
    print(f"http://127.0.0.1:{server.server_port}/metrics", flush=True)
    with Interlock() as locks:
        # So short a ttl only lets the example show renewals soon: leave it out.
        report = locks.lock("report", ttl=0.9, timeout=5)
        while True:
            try:
                with report as lease:
                    time.sleep(random.uniform(0.1, 0.8))  # the work
                    lease.ensure()
            except (AcquireTimeout, LeaseLost) as error:
                print(error, flush=True)
            time.sleep(random.uniform(0.0, 0.1))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 9464)
