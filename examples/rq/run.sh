#!/bin/sh
# Enqueues ten payments for two accounts, then runs three workers, until Ctrl-C.
cd "$(dirname "$0")" || exit
python -c "import bank; bank.main()" && exec rq worker-pool --num-workers 3 --url "${REDIS_URL:-redis://localhost:6379/0}" default
