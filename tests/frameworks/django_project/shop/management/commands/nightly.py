import os
import time
from pathlib import Path

from django.core.management.base import BaseCommand

from interlock.contrib.django import locks, single


@single(at_least=20)
class Command(BaseCommand):
    def add_arguments(self, parser):
        parser.add_argument("report")
        parser.add_argument("--pause", type=float, default=0.0)

    def handle(self, *args, report, pause, **options):
        locks.assert_held("command:nightly").ensure()
        with Path(report).open("a") as out:
            out.write(f"{os.getpid()}\n")
        time.sleep(pause)
        return "done"
