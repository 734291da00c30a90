"""What connects interlock to other libraries. A module that lacks its library names the extra to install.

otel          metrics and traces for OpenTelemetry
celery        tasks under a lock, tasks that are queued once, a beat that only one machine runs
fastapi       a lease as a dependency, busy names as answers, jobs of a leader
starlette     the same for an app of Starlette, without the dependency
django        an app: locks of the settings, until the commit of a transaction, on commands
apscheduler   a scheduler that only the leader runs
dramatiq, rq  tasks under a lock
http          the answer to a request whose lock is busy or lost, which FastAPI and Django share
web           the live page, as an app to mount
"""
