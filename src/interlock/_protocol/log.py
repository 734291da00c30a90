"""The logger of all modules."""

from __future__ import annotations

import logging

log = logging.getLogger("interlock")
